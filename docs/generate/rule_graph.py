"""Draw a graph of rules as SVG: each rule is below the rules that it reads, three in a row."""

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, ROW, GAP, IN_A_ROW = 214, 28, 60, 16, 3
STYLE = (
    ".rules{overflow-x:auto}.rules svg{max-width:none;font:12px var(--font-stack--monospace)}"
    ".rules rect{fill:var(--color-background-secondary);stroke:var(--color-foreground-border)}"
    ".rules text{fill:var(--color-brand-content)}"
    ".rules path{fill:none;stroke:var(--color-foreground-muted);opacity:.6}"
)


def without_shortcuts(graph: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the transitive reduction: no line from a to c if a longer path leads to c."""

    def above(name: str) -> set[str]:
        return {name}.union(*(above(read) for read in graph[name]))

    return {
        name: [read for read in reads if not any(read in above(b) for b in reads if b != read)]
        for name, reads in graph.items()
    }


def rows_of(graph: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the names in rows: each name is below all names that it reads.

    A row is ordered by the mean position of the names that its names read, so that few lines cross.
    """
    depth: dict[str, int] = {}

    def depth_of(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((depth_of(above) for above in graph[name]), default=-1)
        return depth[name]

    rows: list[list[str]] = []
    place: dict[str, float] = {}
    for layer in range(1 + max(map(depth_of, graph))):
        names = sorted(name for name in graph if depth[name] == layer)
        means = {
            name: sum(place[above] for above in graph[name]) / max(1, len(graph[name]))
            for name in names
        }
        names.sort(key=lambda name: (means[name], name))
        for start in range(0, len(names), IN_A_ROW):
            row = names[start : start + IN_A_ROW]
            rows.append(row)
            place |= {name: (i + 0.5) / len(row) for i, name in enumerate(row)}
    return rows


def drawn(graph: Mapping[str, Sequence[str]]) -> str:
    """Return the SVG; each rule is a link to its section."""
    shown = without_shortcuts(graph)
    rows = rows_of(shown)
    breadth = IN_A_ROW * (WIDTH + GAP)
    corners: dict[str, tuple[float, float]] = {}
    for i, row in enumerate(rows):
        left = (breadth - len(row) * (WIDTH + GAP)) / 2 + GAP / 2
        corners |= {name: (left + j * (WIDTH + GAP), i * ROW + 1) for j, name in enumerate(row)}
    lines, boxes = [], []
    for name, (x, y) in corners.items():
        for above in shown[name]:
            x0, y0 = corners[above][0] + WIDTH / 2, corners[above][1] + HEIGHT
            x1, middle = x + WIDTH / 2, (y0 + y) / 2
            curve = f"M{x0:.0f} {y0}C{x0:.0f} {middle} {x1:.0f} {middle} {x1:.0f} {y}"
            lines.append(f'<path d="{curve}"/>')
        anchor = name.replace("_", "-")  # as Sphinx derives it from the rule's heading
        boxes.append(
            f'<a href="#{anchor}"><rect x="{x:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" '
            'rx="5"/>'
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 18}" text-anchor="middle">{name}</text></a>'
        )
    height = len(rows) * ROW - (ROW - HEIGHT) + 2
    size = f'width="{breadth}" height="{height}" viewBox="0 0 {breadth} {height}"'
    label = 'role="img" aria-label="Which rule reads which rule\'s files"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>{"".join(lines + boxes)}</svg>'
    return f'<style>{STYLE}</style><div class="rules">{svg}</div>'
