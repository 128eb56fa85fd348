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
.chart * { stroke-linejoin: round; stroke-linecap: butt; }
.chart text { font-family: inherit; font-variant-numeric: tabular-nums; }
@media (prefers-color-scheme: dark) { .chart image { filter: invert(1); } }
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
figure { margin: 0; }
.narrow { display: none; }
details { margin-top: 0.8rem; }
summary { color: var(--soft); cursor: pointer; font-size: 0.86rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: 1rem 2rem; }
.pair { margin-top: 1.6rem; }
.pair > :only-child { max-width: 26rem; }
.samples { gap: 0 1rem; margin-top: 0; }
.samples small { color: var(--soft); }
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
