"""How the page of results looks: as that of an audit does, with marks for what was measured and what is quoted."""

from darknight.report.audit_style import STYLE as AUDIT

STYLE = (
    AUDIT
    + """
.mark { display: inline-block; border-radius: 4px; padding: 0 .45em; font-size: .78rem; font-weight: 600; }
.mark.measured { background: var(--good-wash); color: var(--good); border: 1px solid var(--good); }
.mark.quoted { background: var(--shown-wash); color: var(--shown); border: 1px dashed var(--shown); }
.mark.missing { background: var(--bad-wash); color: var(--bad); border: 1px solid var(--bad); }
section.part { border-top: 1px solid var(--line); padding-top: 1.6rem; }
section.part > p { max-width: 46rem; }
section.part > figure { margin: 1rem 0; max-width: 66rem; }
section.part > figure img { width: auto; max-width: 100%; }
blockquote { margin: .8rem 0; padding: .5rem 1rem; border-left: 4px solid var(--shown); background: var(--shown-wash);
  max-width: 46rem; border-radius: 0 8px 8px 0; }
.wide { overflow-x: auto; margin: .2rem 0 1.2rem; }
.wide table { width: auto; }
.wide tbody th { border-bottom: 0; border-top: 1px solid var(--line); white-space: nowrap; }
.wide th.column { text-align: right; vertical-align: bottom; max-width: 10rem; line-height: 1.3; }
section.part > p.caption { font-weight: 600; font-size: .92rem; margin: 1.2rem 0 .2rem; max-width: none; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.quoted { background: var(--shown-wash); font-style: italic; }
td.yes { color: var(--good); } td.no { color: var(--pale); } td.open { color: var(--shown); }
td.yes, td.no, td.open { text-align: center; }
tr.ours { background: var(--good-wash); } tr.ours th { color: var(--ink); }
.features th, .features td { padding: .35rem .3rem; font-size: .85rem; }
.features th.column { text-align: center; font-size: .72rem; line-height: 1.2; max-width: 5.4rem; }
ol.tests { padding-left: 1.4rem; } ol.tests li { margin-bottom: .5rem; }
ol.tests code { overflow-wrap: anywhere; font-size: .82rem; }
code.command { display: block; overflow-x: auto; padding: .5rem .8rem; background: var(--card); margin: .4rem 0;
  border: 1px solid var(--line); border-radius: 8px; font-size: .85rem; }
@media (max-width: 720px) {
  .wide thead { display: table-header-group; } .wide table { display: table; width: auto; }
  .wide tbody { display: table-row-group; } .wide tr { display: table-row; border: 0; }
  .wide td, .wide th { display: table-cell; width: auto; padding: .3rem .5rem; }
  .wide td { border-top: 1px solid var(--line); }
  section.part > figure { overflow-x: auto; } section.part > figure img { max-width: none; width: 44rem; }
}
@media print { .wide { overflow: visible; } section.part { break-before: auto; } }
"""
)
