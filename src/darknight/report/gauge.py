"""A number with its interval, guessing and the threshold on one line, as an inline SVG in the colours of the page."""

from __future__ import annotations

import math

from darknight.audit.finding import Finding

_WIDTH, _HEIGHT, _EDGE = 320, 34, 8


def gauge(finding: Finding) -> str:
    """The interval as a bar, the value as a dot, guessing as a thin line, the threshold as a dashed one."""
    marks = (finding.low, finding.high, finding.guessing, finding.threshold)
    bottom, top = min(0.0, *marks), max(1.0 if max(marks) <= 1.0 else 0.0, *marks)
    reach = (top - bottom) or 1.0

    def place(value: float) -> float:
        return round(_EDGE + (value - bottom) / reach * (_WIDTH - 2 * _EDGE), 1)

    low, high, value = place(finding.low), place(finding.high), place(finding.value)
    guess, threshold = place(finding.guessing), place(finding.threshold)
    words = (
        f"{number(finding.value)}, 95 % interval {number(finding.low)} to {number(finding.high)}; "
        f"guessing {number(finding.guessing)}; threshold {number(finding.threshold)}"
    )
    return f"""<svg class="gauge" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{words}">
<title>{words}</title>
<line class="axis" x1="{_EDGE}" x2="{_WIDTH - _EDGE}" y1="14" y2="14"/>
<line class="guess" x1="{guess}" x2="{guess}" y1="5" y2="23"/>
<line class="threshold" x1="{threshold}" x2="{threshold}" y1="3" y2="25"/>
<rect class="bar" x="{low}" y="11" width="{max(2.0, round(high - low, 1))}" height="6" rx="3"/>
<circle class="dot" cx="{value}" cy="14" r="4.5"/>
<text x="{_EDGE}" y="33">{number(bottom)}</text><text x="{_WIDTH - _EDGE}" y="33" text-anchor="end">{number(top)}</text>
</svg>"""


def number(value: float) -> str:
    """Three digits that mean something, and a minus that is one.

    >>> number(0.30659), number(-0.0001), number(12345.0), number(0.99999), number(3e-9)
    ('0.307', '0.000', '12,345', '1.000', '3.0e-09')
    """
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if 0 < size < 1e-6:
        return f"{value:.1e}"
    digits = 3 if size < 10 else 1
    text = f"{value:z.{digits}f}"
    return text.replace("-", "\N{MINUS SIGN}") if not math.isclose(value, 0.0, abs_tol=0.5 * 10**-digits) else text
