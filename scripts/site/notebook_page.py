"""The notebook of examples/ as a page: its words, its code, and what it printed and drew when it was run last."""

import base64
import json
from pathlib import Path
from typing import Any

_WHERE = "This is `examples/notebook.ipynb`, with what it printed when it was run last."


def notebook_page(path: Path, page: str) -> tuple[str, dict[str, bytes]]:
    """The page as Markdown, and its pictures by the names that it calls them.

    A picture needs words for whoever does not see it, and a caption: "alt" and "caption" in the metadata of its cell.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            if picture := output.get("data", {}).get("image/png"):
                name = f"{Path(page).stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(picture))
                parts.append(_figure(name, cell["metadata"]))
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, _WHERE, rest.strip(), *parts[1:]]), pictures


def _figure(name: str, words: dict[str, Any]) -> str:
    return (
        f'<figure markdown="span">\n  ![{words["alt"]}]({name}){{ .as-drawn }}\n'
        f"  <figcaption>{words['caption']}</figcaption>\n</figure>"
    )
