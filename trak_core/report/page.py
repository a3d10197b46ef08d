"""The page around the sections: everything it needs is in it, nothing is fetched."""

from collections.abc import Sequence

from trak_core.report.elements import Html, element, joined

# System fonts; tables scroll in their own box; pictures wrap; the same on paper.
_CSS = """
:root { --ink: #1c1c1c; --soft: #5a5a5a; --line: #d8d8d8; --good: #1b7837; --bad: #b2182b;
  --blue: #0b5394; --back: #f6f7f9; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; color: var(--ink); background: #fff; font: 16px/1.55 system-ui, -apple-system,
  "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; overflow-wrap: anywhere; }
main, header, nav { max-width: 70rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.35rem; line-height: 1.25; margin: 3rem 0 .75rem; padding-top: .75rem;
  border-top: 2px solid var(--ink); }
h3 { font-size: 1.08rem; margin: 2rem 0 .5rem; }
h4 { font-size: .95rem; margin: 0 0 .35rem; font-weight: 600; }
p, ul, ol { max-width: 46rem; margin: .6rem 0; }
ul, ol { padding-left: 1.3rem; }
a { color: var(--blue); }
.lead { color: var(--soft); margin-top: 0; }
code, pre, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
  monospace; font-size: .86em; }
pre { background: var(--back); padding: .8rem 1rem; overflow-x: auto; border-radius: 4px;
  overflow-wrap: normal; margin: .6rem 0; }
nav ol { columns: 2 16rem; list-style: none; padding: .75rem 1rem; background: var(--back);
  border-radius: 4px; max-width: none; }
dl.facts { display: grid; gap: .75rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
dl.facts div { background: var(--back); border-radius: 4px; padding: .6rem .8rem; }
dl.facts dt { font-size: .82rem; color: var(--soft); }
dl.facts dd { margin: 0; font-size: 1.2rem; font-weight: 600; line-height: 1.3; }
.verdict, .warning { border-left: 5px solid var(--blue); background: var(--back);
  padding: .5rem 1rem; margin: 1rem 0; border-radius: 0 4px 4px 0; max-width: 50rem; }
.warning { border-color: #b45f06; background: #fdf6ec; }
.scroll { overflow-x: auto; max-width: 100%; }
figure.table { margin: .9rem 0 1.4rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
figure.table figcaption { color: var(--soft); font-size: .9rem; max-width: 46rem; }
th, td { text-align: left; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; font-weight: 400; }
thead th { font-weight: 600; border-bottom: 1.5px solid var(--ink); vertical-align: bottom; }
th.number, td.number { text-align: right; }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem 2rem; margin: 1rem 0; }
figure { margin: 0; }
figure.chart { max-width: 100%; width: 346px; }
figure.chart figcaption { font-weight: 600; font-size: .92rem; margin-bottom: .3rem; }
img { max-width: 100%; height: auto; display: block; }
.legend { list-style: none; padding: 0; margin: .3rem 0 0; font-size: .85rem; }
.key { display: inline-block; width: 1.6rem; border-top: 3px solid; vertical-align: middle;
  margin-right: .5rem; }
.key.dashed { border-top-style: dashed; }
.target { display: grid; grid-template-columns: 8.5rem 1fr 1fr; gap: .75rem 1.5rem;
  padding: 1rem 0; border-bottom: 1px solid var(--line); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; }
.tile { width: 6.1rem; font-size: .8rem; line-height: 1.35; margin: 0; }
.tile img, .target .this img { width: 100%; border: 2px solid var(--line); border-radius: 3px;
  image-rendering: auto; background: #fff; }
.this { font-size: .85rem; line-height: 1.4; }
.this figure { width: 7.5rem; margin-bottom: .4rem; }
.up h4 { color: var(--good); } .down h4 { color: var(--bad); }
.up .tile img { border-color: var(--good); } .down .tile img { border-color: var(--bad); }
.tile b, .this b { display: block; }
.printed .tile { width: 100%; border-left: 3px solid var(--line); padding-left: .6rem; }
.printed.up .tile { border-color: var(--good); } .printed.down .tile { border-color: var(--bad); }
.printed .tile .mono, .this .mono { display: block; color: var(--soft); }
details { margin: 1rem 0; } summary { cursor: pointer; color: var(--blue); padding: .3rem 0; }
footer { color: var(--soft); font-size: .85rem; margin: 3rem auto; max-width: 70rem;
  padding: 0 1.25rem; }
@media (max-width: 760px) {
  main, header, nav, footer { padding-left: .9rem; padding-right: .9rem; }
  .target { grid-template-columns: 1fr; }
  thead th { white-space: normal; } thead th.number { min-width: 4.2rem; }
  tbody th { white-space: normal; min-width: 7rem; max-width: 11rem; overflow-wrap: break-word; }
  .tiles { gap: .5rem; } .tile { width: 5.1rem; }
  .this { display: flex; gap: .9rem; } .this figure { flex: none; }
}
"""
# A page that fetches nothing, and is allowed to fetch nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, lead: str, sections: Sequence[tuple[str, str, Html]]) -> str:
    """Return the whole document.

    Args:
        title: The page's name.
        lead: A line below it.
        sections: Anchor, title and markup of each.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(_CSS)),
    )
    contents = element(
        "ol",
        *(element("li", element("a", name, href=f"#{anchor}")) for anchor, name, _ in sections),
    )
    body = element(
        "body",
        element("header", element("h1", title), element("p", lead, class_="lead")),
        element("nav", contents, aria_label="Contents"),
        element("main", *(markup for _, _, markup in sections)),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{joined([head, body])}</html>\n'
