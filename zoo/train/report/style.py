"""Style sheets of reports and charts."""

COLORS = """
:root {
  --paper: #ffffff; --panel: #f6f7f9; --ink: #1b1f24; --soft: #626b76; --rule: #e2e5e9; --shade: #1b1f2440;
  --train: #2563c9; --held-out: #d9601a; --third: #2f8f5b; --fourth: #8a4fc7;
  --fifth: #c23b4a; --sixth: #8f7100; --seventh: #0f8ba0; --eighth: #b5449a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --panel: #1c2026; --ink: #e6e8eb; --soft: #98a1ac; --rule: #2f353d; --shade: #000000a0;
    --train: #6ea8ff; --held-out: #ff9a57; --third: #63c592; --fourth: #c29bf0;
    --fifth: #ff8080; --sixth: #d8b73f; --seventh: #58c7d8; --eighth: #f08fd2;
  }
}
"""

CHART = """
.chart { display: block; width: 100%; height: auto; overflow: visible; }
.chart text { fill: var(--soft); font-size: 12.5px; font-variant-numeric: tabular-nums; }
.chart path { fill: none; stroke: currentColor; }
.chart .grid { color: var(--rule); }
.chart .axis { color: var(--soft); }
.chart .line { stroke-width: 2; stroke-linejoin: round; }
.chart .raw { opacity: 0.3; }
.chart .curve0 { color: var(--train); }
.chart .curve1 { color: var(--held-out); }
.chart .curve2 { color: var(--third); }
.chart .curve3 { color: var(--fourth); }
.chart .curve4 { color: var(--fifth); }
.chart .curve5 { color: var(--sixth); }
.chart .curve6 { color: var(--seventh); }
.chart .curve7 { color: var(--eighth); }
.chart .line.curve2 { stroke-dasharray: 7 3; }
.chart .line.curve3 { stroke-dasharray: 2 3; }
.chart .line.curve5 { stroke-dasharray: 10 4; }
.chart .line.curve6 { stroke-dasharray: 4 4; }
.chart .line.curve7 { stroke-dasharray: 9 3 2 3; }
.chart .dot { fill: currentColor; stroke: var(--paper); stroke-width: 1.2; }
.chart .floor { color: var(--soft); stroke-dasharray: 5 4; }
.chart .pixels { fill: var(--ink); stroke: none; }
.chart .missed { color: var(--held-out); stroke-width: 2; }
.chart .even, .chart [class^="less"], .chart [class^="more"] { stroke: none; }
.chart .even { fill: var(--rule); fill-opacity: 0.6; }
.chart [class^="less"] { fill: var(--train); }
.chart [class^="more"] { fill: var(--held-out); }
.chart .less1, .chart .more1 { fill-opacity: 0.3; }
.chart .less2, .chart .more2 { fill-opacity: 0.6; }
"""

_PAGE = """
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 64rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 0.4rem; }
h2 { font-size: 1.05rem; margin: 2.6rem 0 0.7rem; }
header { margin-bottom: 1.6rem; }
header p { color: var(--soft); font-size: 1.06rem; margin: 0; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: 0.75rem; margin: 1.8rem 0; }
dl div { background: var(--panel); border-radius: 0.6rem; padding: 0.7rem 0.9rem; }
dt { color: var(--soft); font-size: 0.8rem; }
dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.narrow { display: none; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: 1rem 2rem; }
.pair { margin-top: 1.6rem; }
.pair > :only-child { max-width: 26rem; }
.scroll {  /* a shade at each edge beyond which there is more; paper that moves along covers it at the ends */
  overflow-x: auto; background-repeat: no-repeat; background-attachment: local, local, scroll, scroll;
  background-image: linear-gradient(90deg, var(--paper) 40%, transparent),
    linear-gradient(270deg, var(--paper) 40%, transparent),
    linear-gradient(90deg, var(--shade), transparent), linear-gradient(270deg, var(--shade), transparent);
  background-position: 0 0, 100% 0, 0 0, 100% 0;
  background-size: 3rem 100%, 3rem 100%, 1rem 100%, 1rem 100%;
}
table { border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.36rem 1.1rem 0.36rem 0; }
th, td { border-bottom: 1px solid var(--rule); }
th:last-child, td:last-child { padding-right: 0; }
th { font-weight: 500; color: var(--soft); }
.pairs th { width: 1%; white-space: nowrap; }
.pairs td { overflow-wrap: anywhere; }
.number { text-align: right; }
.number, .parameters td, .results td, .results th { white-space: nowrap; }
.parameters small { color: var(--soft); white-space: normal; }
.total td { font-weight: 600; border-bottom: none; }
pre {
  background: var(--panel); border-radius: 0.6rem; padding: 0.9rem 1rem; margin: 0 0 0.8rem; font-size: 0.84rem;
  line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4;
}
pre b { color: var(--train); font-weight: 600; }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.5rem; }
  .wide { display: none; }
  .narrow { display: block; }
  .parameters small { white-space: nowrap; }
  dl { grid-template-columns: repeat(2, 1fr); }
}
"""

STYLE = COLORS + _PAGE + CHART
