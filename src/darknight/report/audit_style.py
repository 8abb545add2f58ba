"""How the page of an audit looks: light and dark, on a screen, a phone and paper."""

STYLE = """
:root {
  --ink: #1b1b2b; --pale: #5d5d72; --paper: #fbfbfd; --card: #ffffff; --line: #dfdfe8;
  --good: #146c43; --bad: #b3261e; --shown: #9a5b00; --accent: #0b5c86;
  --good-wash: #eaf6f0; --bad-wash: #fdecea; --shown-wash: #fdf4e3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e8e8f0; --pale: #a3a3b8; --paper: #14141d; --card: #1d1d29; --line: #34344a;
    --good: #6fd3a0; --bad: #ff8a80; --shown: #f0b95a; --accent: #7cc4ea;
    --good-wash: #17291f; --bad-wash: #3a1a1a; --shown-wash: #2d2514;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: .2rem 0 .8rem; }
h3::first-letter, td.target::first-letter { text-transform: uppercase; }
h2 { font-size: 1.35rem; margin: 0 0 .4rem; }
h3 { font-size: 1rem; margin: 0 0 .2rem; }
h1.good { color: var(--good); } h1.bad { color: var(--bad); }
a { color: var(--accent); }
code { font-size: .95em; }
.brand { margin: 0; letter-spacing: .06em; text-transform: uppercase; font-size: .8rem; color: var(--pale); }
.lead { max-width: 46rem; margin: 0 0 .5rem; }
.facts, .details, small, footer { color: var(--pale); font-size: .85rem; }
section { margin-top: 2.2rem; }
section.attack { border-top: 1px solid var(--line); padding-top: 1.6rem; }
.sign { font-weight: 700; } .sign.good { color: var(--good); } .sign.bad { color: var(--bad); }
.sign.shown { color: var(--shown); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; color: var(--pale); font-weight: 600; padding: .4rem .6rem;
  border-bottom: 2px solid var(--line); }
td { vertical-align: top; padding: .45rem .6rem; }
td { border-top: 1px solid var(--line); }
tr.attack th { padding-top: 1rem; border: 0; font-size: 1rem; }
tr.bad { background: var(--bad-wash); }
td.must, td.verdict, td.measured, .interval { white-space: nowrap; }
.good .verdict { color: var(--good); } .bad .verdict { color: var(--bad); font-weight: 700; }
.shown .verdict { color: var(--shown); }
details { margin-top: 1.2rem; max-width: 46rem; } summary { cursor: pointer; color: var(--accent); }
.question { font-size: 1.08rem; font-weight: 600; margin: 0 0 .3rem; }
section.attack > p { max-width: 46rem; }
.findings { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: .9rem; margin: 1rem 0; }
.finding { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--good);
  border-radius: 8px; padding: .8rem 1rem; }
.finding.bad { border-left-color: var(--bad); background: var(--bad-wash); }
.finding.shown { border-left-color: var(--shown); }
.finding p { margin: .3rem 0; font-size: .92rem; }
.finding .verdict { font-weight: 600; } .finding .details { font-size: .8rem; }
.gauge { display: block; width: 100%; max-width: 24rem; height: auto; margin: .3rem 0; }
.gauge text { font-size: 9px; fill: var(--pale); }
.gauge .axis { stroke: var(--line); stroke-width: 2; }
.gauge .guess { stroke: var(--pale); stroke-width: 1.5; }
.gauge .threshold { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 3 2; }
.gauge .bar, .gauge .dot { fill: var(--good); } .bad .gauge .bar, .bad .gauge .dot { fill: var(--bad); }
.shown .gauge .bar, .shown .gauge .dot { fill: var(--shown); }
.gauge .bar { opacity: .45; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem;
  align-items: start; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .8rem; }
figure img { display: block; width: 100%; height: auto; background: #fff; border-radius: 4px; }
figcaption { font-size: .85rem; color: var(--pale); margin-top: .5rem; }
figcaption.title { font-weight: 600; color: var(--ink); margin: 0 0 .5rem; }
.todo { background: var(--good-wash); border-radius: 8px; padding: .7rem 1rem; margin-top: 1rem; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
@media (max-width: 720px) {
  main { padding: 1rem .9rem 2rem; } h1 { font-size: 1.45rem; }
  thead { display: none; }
  table, tbody, tr, td { display: block; width: 100%; }
  tr { border: 1px solid var(--line); border-radius: 8px; padding: .4rem .2rem; margin-bottom: .7rem; }
  tr.attack { border: 0; margin: 0; } tr.attack th { padding: .8rem .2rem .3rem; display: block; }
  td { border: 0; padding: .1rem .7rem; } td.must { display: none; }
  td.measured, td.guessing { display: inline-block; width: auto; padding-right: 0; }
  td[data-name]::before { content: attr(data-name) ": "; color: var(--pale); font-size: .85em; font-weight: 400; }
  .findings { grid-template-columns: 1fr; }
}
@media print { .finding, figure, tr { break-inside: avoid; } a { color: inherit; } }
"""
