"""The page of an audit: one HTML file that needs nothing else, for a reviewer with or without a network."""

from __future__ import annotations

from base64 import b64encode
from datetime import date
from html import escape

from darknight import __version__
from darknight.audit.finding import Finding, Must, Picture
from darknight.audit.suite import Attacked, Audit, verdict
from darknight.report.audit_style import STYLE
from darknight.report.gauge import gauge, number


def audit_page(audit: Audit, *, on: date) -> str:
    """The whole page. Every text is escaped; pictures are inside; nothing is loaded from anywhere, and nothing runs."""
    sections = "".join(_section(count, each) for count, each in enumerate(audit.attacks, 1))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>DarKnight audit: {_verdict_words(audit).lower()}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{_head(audit, on)}
{_summary(audit)}
{_reading()}
{sections}
<footer>Made by <code>darknight audit{" --quick" if audit.quick else ""}</code>, version {escape(__version__)}.
Numbers differ a little from run to run, because masks do: they come from the operating system, and no seed repeats
them.</footer>
</main>
</body>
</html>
"""


# --- the top of the page ----------------------------------------------------------------------------------------------
def _head(audit: Audit, on: date) -> str:
    kind = "good" if audit.passed else "bad"
    shape = "x".join(map(str, audit.shape))
    how = "Quick version: fewer images and epochs." if audit.quick else "Full version."
    return f"""<header>
<p class="brand">DarKnight audit</p>
<h1 class="{kind}">{_sign(kind)} {_verdict_words(audit)}</h1>
<p class="lead">Workers of a real training were recorded, and what they saw was attacked. Attacks that must fail ran
against the scheme; the same attacks ran against deliberately broken versions of it, where they must succeed, because an
attack that never succeeds proves nothing.</p>
<p class="facts">{audit.examples:,} examples of {escape(audit.data)} ({shape}), {escape(audit.model)}, seed
{audit.seed}. {how} {audit.seconds:.0f} seconds, on {on.isoformat()}.</p>
</header>"""


def _verdict_words(audit: Audit) -> str:
    total = sum(len(each.findings) for each in audit.attacks)
    wrong = len(audit.surprises)
    if wrong:
        return f"{wrong} of {total} findings {'is not as it' if wrong == 1 else 'are not as they'} must be"
    return f"All {total} findings are as they must be"


def _summary(audit: Audit) -> str:
    rows = []
    for count, each in enumerate(audit.attacks, 1):
        link = f'<a href="#{escape(each.attack.key)}">{count}. {escape(each.attack.title)}</a>'
        rows.append(f'<tr class="attack"><th colspan="5" scope="colgroup">{link}</th></tr>')
        rows += [_row(finding) for finding in each.findings]
    return f"""<section id="summary">
<h2>Summary</h2>
<table>
<thead><tr><th>Attack, and what was attacked</th><th>Must</th><th>Measured, 95 % interval</th><th>Guessing</th>
<th>Verdict</th></tr></thead>
<tbody>{"".join(rows)}</tbody>
</table>
</section>"""


def _row(finding: Finding) -> str:
    kind = _kind(finding)
    return f"""<tr class="{kind}{" control" * finding.control}">
<td class="target">{escape(finding.target)}<br><small>{escape(finding.measure)}</small></td>
<td data-name="Must" class="must">{finding.must}</td>
<td data-name="Measured" class="measured">{_measured(finding)}</td>
<td data-name="Guessing" class="guessing">{number(finding.guessing)}</td>
<td class="verdict">{_sign(kind)} {verdict(finding)}</td>
</tr>"""


def _reading() -> str:
    return f"""<details>
<summary>How to read this</summary>
<p>More is better for the attacker. The bar is the 95 % interval of what was measured, the dot the value, the thin line
what guessing reaches, the dashed line the threshold. An attack has <em>succeeded</em> if its whole interval lies above
the threshold and <em>failed</em> if the whole interval lies below it; an interval on both sides is
<em>undecided</em>, and counts as not as it must be.</p>
<ul>
<li>{_sign("good")} as it must be: a sound scheme withstood, or the control was broken.</li>
<li>{_sign("bad")} not as it must be: the scheme was broken, or the attack proves nothing, as its control failed.</li>
<li>{_sign("shown")} shown: a limit of what is promised, which no threshold judges.</li>
</ul>
</details>"""


# --- one attack -------------------------------------------------------------------------------------------------------
def _section(count: int, attacked: Attacked) -> str:
    attack = attacked.attack
    pictures = "".join(_figure(picture) for finding in attacked.findings for picture in finding.pictures)
    cards = "".join(_finding(finding) for finding in attacked.findings)
    return f"""<section id="{escape(attack.key)}" class="attack">
<h2>{count}. {escape(attack.title)}</h2>
<p class="question">{escape(attack.question)}</p>
<p>{escape(attack.how)}</p>
<div class="findings">{cards}</div>
<div class="pictures">{pictures}</div>
<p class="todo"><strong>What to do.</strong> {escape(attack.what_to_do)}</p>
</section>"""


def _finding(finding: Finding) -> str:
    kind = _kind(finding)
    inside = " is inside" if finding.guessing_inside else ""
    details = " · ".join(f"{escape(name)}: {escape(_plain(value))}" for name, value in finding.details.items())
    return f"""<article class="finding {kind}{" control" * finding.control}">
<h3>{escape(finding.target)}</h3>
<p class="verdict">{_sign(kind)} {verdict(finding)}</p>
<p class="measured">{escape(finding.measure)}:<br>{_measured(finding)}, guessing {number(finding.guessing)}{inside}</p>
{gauge(finding)}
<p>{escape(finding.words)}</p>
<p class="details">{details}</p>
</article>"""


def _figure(picture: Picture) -> str:
    source = b64encode(picture.png).decode()
    return f"""<figure>
<figcaption class="title">{escape(picture.title)}</figcaption>
<img src="data:image/png;base64,{source}" alt="{escape(picture.caption)}">
<figcaption>{escape(picture.caption)}</figcaption>
</figure>"""


# --- words ------------------------------------------------------------------------------------------------------------
def _measured(finding: Finding) -> str:
    interval = f"[{number(finding.low)}, {number(finding.high)}]"
    return f'<strong>{number(finding.value)}</strong> <span class="interval">{interval}</span>'


def _kind(finding: Finding) -> str:
    if finding.must is Must.SHOW:
        return "shown"
    return "good" if finding.as_it_must else "bad"


def _sign(kind: str) -> str:
    """Not by colour alone."""
    return f'<span class="sign {kind}" aria-hidden="true">{ {"good": "✓", "bad": "✗", "shown": "●"}[kind] }</span>'


def _plain(value: float | int | str) -> str:
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if isinstance(value, int) else value
