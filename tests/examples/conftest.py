"""Scripts that tests here run with libraries that this environment need not have: not to be looked at for doctests."""

collect_ignore = ["lightning_switches.py", "huggingface_switches.py"]
