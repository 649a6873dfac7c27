"""The style sheet of the page, in the colors of its pictures."""

from vitray.plotting import DARK, LIGHT, Theme

STATE_COLORS = {"finished": "good", "stopped early": "warn", "failed": "bad", "running": "accent", "waiting": "rest"}


def _variables(theme: Theme) -> str:
    names = ("paper", "ink", "pale", "grid", "rest", "raised", "warn", "good", "bad")
    colors = {name: getattr(theme, name) for name in names} | {"accent": theme.series[0]}
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


SHEET = (
    f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n"
    """
*, *::before, *::after { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: break-word;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 72px; }
h1 { font-size: 32px; line-height: 1.15; letter-spacing: -0.015em; margin: 4px 0 8px; }
h2 { font-size: 21px; line-height: 1.25; letter-spacing: -0.01em; margin: 0 0 6px; }
p { margin: 0 0 12px; max-width: 70ch; }
a { color: var(--accent); text-underline-offset: 2px; }
a:focus-visible, summary:focus-visible, .scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
section { border-top: 1px solid var(--grid); padding-top: 28px; margin-top: 36px; }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.pale, .eyebrow, figcaption { color: var(--pale); }
.eyebrow { font-size: 14px; margin: 0; }
.lede { font-size: 18px; margin-bottom: 24px; }

.hero { display: flex; flex-wrap: wrap; gap: 28px 56px; align-items: flex-start;
  background: var(--raised); border: 1px solid var(--grid); border-radius: 12px; padding: 22px 26px 20px; }
.hero > div { flex: 1 1 300px; min-width: 0; }
.big { font-size: 52px; line-height: 1; font-weight: 650; letter-spacing: -0.03em; margin: 0 0 6px;
  font-variant-numeric: tabular-nums; }
.big small { display: inline-block; line-height: 1.4; font-size: 16px; font-weight: 400; letter-spacing: 0;
  color: var(--pale); margin-left: 8px; }
.hero p { margin-bottom: 6px; }
.hero p:last-child { margin-bottom: 0; }
.bar { display: flex; gap: 2px; height: 10px; margin: 10px 0 14px; border-radius: 5px; overflow: hidden; }
.bar span { min-width: 4px; }
.states { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 22px; }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 7px; }
nav { margin-top: 20px; font-size: 14px; }
nav ul { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 18px; }

.scroll { overflow-x: auto; margin: 16px 0; border: 1px solid var(--grid); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 7px 11px; white-space: nowrap; vertical-align: top; }
th { white-space: normal; font-weight: 600; color: var(--pale); background: var(--raised); vertical-align: bottom; }
th cite { display: block; white-space: normal; min-width: 11em; }
.wide { white-space: normal; min-width: 14em; max-width: 26em; }
td { border-top: 1px solid var(--grid); }
.number { text-align: right; }
tr.best td { font-weight: 600; }
tr.best code { font-weight: 400; }
td small, dd small { color: var(--pale); font-size: 13px; font-weight: 400; }

figure { margin: 0; min-width: 0; }
.pictures { display: grid; gap: 28px 36px; margin-top: 18px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
figure img { display: block; width: 100%; max-width: 540px; height: auto; }
figcaption { font-size: 14px; line-height: 1.45; margin-top: 4px; max-width: 60ch; }
.single { margin-top: 14px; }
.stacked { display: grid; gap: 28px; margin-top: 18px; }
.stacked figure img { max-width: none; }
.files { font-size: 14px; color: var(--pale); margin: 16px 0 0; max-width: none; }
@media (min-width: 900px) {
  /* A single picture has its text beside it. */
  .single { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 36px; }
  .single .prose { order: 1; padding-top: 30px; }
  .pictures figure:last-child:nth-child(odd) { grid-column: 1 / -1; display: grid; align-items: center;
    grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 36px; }
}

h3 { font-size: 16px; margin: 26px 0 10px; }
.gallery { list-style: none; margin: 14px 0; padding: 0; display: grid; gap: 18px 16px;
  grid-template-columns: repeat(auto-fill, minmax(132px, 1fr)); }
.strips { list-style: none; margin: 14px 0 28px; padding: 0; display: grid; gap: 24px 28px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
.strips li { font-size: 13px; line-height: 1.35; min-width: 0; }
.strip { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(0, 1fr); gap: 4px; margin-bottom: 6px; }
.strip img { border-radius: 6px; }
.strip img.tiny { image-rendering: pixelated; }
.strip figcaption { font-size: 12px; margin-top: 2px; }
.strips strong, .strips li > span { display: block; overflow-wrap: anywhere; }
.strips li > span { color: var(--pale); }
.strips li > span.mistake { color: var(--bad); }
.gallery li { font-size: 13px; line-height: 1.35; min-width: 0; }
.gallery img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: 8px;
  background: var(--raised); margin-bottom: 6px; }
.gallery img.tiny { image-rendering: pixelated; }
.gallery strong, .gallery span { display: block; overflow-wrap: anywhere; }
.gallery span { color: var(--pale); }

details { margin: 10px 0; }
td details { margin: 0; }
summary { cursor: pointer; color: var(--accent); }
pre, code.command { display: block; margin: 8px 0 0; padding: 10px 12px; background: var(--raised);
  border: 1px solid var(--grid); border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
code.command { user-select: all; -webkit-user-select: all; cursor: copy; }
td code.command { width: 34ch; font-weight: 400; }
tr.best summary { font-weight: 600; }
.hero details { margin: 0 0 8px; font-size: 14px; }
dl { display: grid; grid-template-columns: fit-content(14em) minmax(0, 1fr); gap: 6px 22px; margin: 12px 0; }
dt { color: var(--pale); }
dt, dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.troubles { list-style: none; margin: 12px 0 0; padding: 0; }
.troubles li { padding: 12px 0; border-top: 1px solid var(--grid); }
.troubles li:first-child { border-top: 0; }
footer { margin-top: 40px; font-size: 14px; color: var(--pale); }

@media (max-width: 560px) {
  main { padding: 24px 16px 48px; }
  h1 { font-size: 26px; }
  .hero { padding: 18px; }
  .big { font-size: 42px; }
  .big small { display: block; margin: 6px 0 0; line-height: 1.4; }
  dl { grid-template-columns: minmax(0, 1fr); gap: 0; }
  dd { margin-bottom: 10px; }
  th, td { padding: 7px 10px; }
  td:first-child { white-space: normal; min-width: 8em; }
  td small { display: block; }
}
@media print { .hero, .scroll, section { break-inside: avoid; } nav { display: none; } }
"""
)
