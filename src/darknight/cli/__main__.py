"""python -m darknight.cli"""

from darknight.cli import main

if __name__ == "__main__":
    main()
