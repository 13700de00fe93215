"""What the pictures of this folder share: records, colors, frame, marks and the command line. The standard library alone."""

import csv
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDS = ROOT / "benches" / "records"
COMMON = ".page { fill: #ffffff } .text { fill: #1f2328 } .soft { fill: #59636e } .grid { stroke: #d1d9e0 }"
# Colors of a light page and what a dark one has in their place.
DARK = {
    "#ffffff": "#0d1117",
    "#1f2328": "#f0f6fc",
    "#59636e": "#9198a1",
    "#d1d9e0": "#3d444d",
    "#0969da": "#58a6ff",
    "#54aeff": "#a5d6ff",
    "#bc4c00": "#f0883e",
    "#8250df": "#bc8cff",
    "#cf222e": "#f85149",
}


def read(record):
    """Rows of a record, without its comments."""
    return list(csv.DictReader(line for line in record.read_text().splitlines() if not line.startswith("#")))


class Picture:
    """An SVG of a size with margins, in which marks are put one after the other."""

    def __init__(self, width, height, margins, title, heading, rules):
        self.left, right, self.top, bottom = margins
        self.right, self.bottom = width - right, height - bottom
        light = dark = f"{COMMON}\n  {rules}"
        for color, other in DARK.items():
            dark = dark.replace(color, other)
        self.marks = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{title}</title>",
            f"<style>\n  {light}\n  @media (prefers-color-scheme: dark) {{\n  {dark}\n  }}\n</style>",
            f'<rect class="page" width="{width}" height="{height}"/>',
        ]
        self.text(16, 26, heading, "text", size=16, bold=True)

    def add(self, mark):
        self.marks.append(mark)

    def text(self, x, y, text, kind="soft", anchor=None, size=None, bold=False):
        more = f' text-anchor="{anchor}"' if anchor else ""
        more += f' font-size="{size}"' if size else ""
        more += ' font-weight="600"' if bold else ""
        self.add(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{more}>{text}</text>')

    def level(self, y, label, kind="grid"):
        """A horizontal line with its label on the left."""
        self.add(f'<line class="{kind}" x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        self.text(self.left - 8, y + 4, label, anchor="end")

    def steps(self, last, x):
        """An axis of steps."""
        for step in range(0, int(last) + 1, 5):
            self.text(x(step), self.bottom + 18, step, anchor="middle")
        self.text((self.left + self.right) / 2, self.bottom + 36, "step", anchor="middle")

    def curve(self, kind, points, width=2):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add(f'<polyline class="{kind}" fill="none" stroke-width="{width}" stroke-linejoin="round" points="{points}"/>')

    def label(self, kind, y, name, below):
        """Name and figures of a curve, on the right."""
        self.text(self.right + 8, y, name, f"{kind}-label", size=12, bold=True)
        self.text(self.right + 8, y + 16, below, "text", size=12)

    def svg(self):
        return "\n".join([*self.marks, "</svg>"]) + "\n"


def main(script, usage, draw, measure=None, arguments=0):
    """Writes the picture beside its script or `--to FILE`, after `--measure ARGUMENTS` where there is such."""
    file = pathlib.Path(script).with_suffix(".svg")
    match sys.argv[1:]:
        case []:
            pass
        case ["--to", other]:
            file = pathlib.Path(other)
        case ["--measure", *given] if measure and len(given) == arguments:
            measure(*given)
        case _:
            sys.exit(usage)
    file.write_text(draw())
