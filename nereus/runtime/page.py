"""What do all pages that Nereus writes have in common?

Owner: reports of runs and of comparisons. One HTML file without scripts or outside resources.
Invariants (tests/runtime/test_report.py): text of a model is escaped; nothing is fetched from elsewhere.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from nereus.runtime.logs import escape

_CSS = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif;color:#1f2937;background:#f6f7f9;margin:0}
main{max-width:1160px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;margin:0}h2{font-size:17px;margin:36px 0 12px}
.outcome{margin:2px 0 24px;color:#047857}.failed{color:#b91c1c}
.cards{display:grid;grid-template-columns:repeat(4,1fr);gap:14px}
.card,figure,table{background:#fff;border:1px solid #e5e7eb;border-radius:10px}
.card{padding:12px 16px}.card b{display:block;font-size:23px;font-weight:600}.card span{color:#6b7280;font-size:13px}
.plots{display:grid;grid-template-columns:repeat(2,1fr);gap:14px}
@media(max-width:800px){.cards,.plots{grid-template-columns:1fr}}
figure{margin:0;padding:12px 14px 8px}figcaption{font-weight:600;font-size:14px;margin-bottom:6px}
figure svg{width:100%;height:auto;display:block}
table{border-collapse:separate;border-spacing:0;width:100%;overflow:hidden}
td,th{padding:8px 14px;text-align:left;vertical-align:top;border-top:1px solid #eef0f3}
tr:first-child td,tr:first-child th{border-top:0}th{font-weight:500;color:#6b7280;font-size:13px;white-space:nowrap}
td.text{font:13px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;word-break:break-word}
td.num,th.num{text-align:right;white-space:nowrap}
.said{color:#6b7280;font-size:13px}
"""


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page with ``title``, made of elements of HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{_CSS}</style></head>\n<body><main>"
        + "\n".join(body)
        + "</main></body></html>\n"
    )


def text(words: str) -> str:
    """Return ``words`` as they are written in HTML, with control characters made visible."""
    return html.escape(escape(words))
