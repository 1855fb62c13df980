//! The style of the page: light and print from the same values, dark for screens that ask for it, one column on a phone.

use std::fmt::Write;

use crate::palette::{
    ACCENT, AXIS, CARD, Color, INK, KINDS, LINE, PAPER, SERIES, SOFT, WARN, WARN_INK, of_charts,
};

/// Names of the colors in the rules below.
const NAMES: [(&str, Color); 9] = [
    ("paper", PAPER),
    ("card", CARD),
    ("ink", INK),
    ("soft", SOFT),
    ("line", LINE),
    ("axis", AXIS),
    ("accent", ACCENT),
    ("warn", WARN),
    ("warn-ink", WARN_INK),
];

const RULES: &str = "\
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif}
main,header,footer{max-width:1200px;margin:0 auto;padding:0 20px}
header{padding-top:28px;padding-bottom:8px}
h1{font-size:28px;line-height:1.2;margin:0 0 6px}
h2{font-size:22px;line-height:1.25;margin:40px 0 10px;padding-top:18px;border-top:1px solid var(--line)}
main>:first-child>h2:first-child,main>h2:first-child{margin-top:12px}
h3{font-size:18px;margin:34px 0 6px}
h4{font-size:15px;margin:20px 0 6px}
p{margin:6px 0 10px;max-width:78ch}
a{color:var(--accent)}
.soft,.of,.rule{color:var(--soft)}
.soft,.of,.rule,figcaption,dl,table{font-size:14px}
.rule,.of{font-size:13px;display:block}
nav{font-size:14px;margin-top:8px;display:flex;flex-wrap:wrap;gap:4px 18px}
.warn{background:var(--warn);color:var(--warn-ink);border-radius:8px;padding:10px 14px;margin:12px 0;max-width:none}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px;margin:12px 0}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,150px),1fr));gap:8px 20px;margin:0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere;font-weight:500}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:14px;margin-bottom:14px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 8px 6px;break-inside:avoid}
figcaption{padding:0 8px;font-weight:600}figcaption .soft{font-weight:400;font-size:13px;display:block}
svg.chart{display:block;width:100%;max-width:420px;height:auto;margin:2px auto 0}
svg.chart text{font-family:inherit}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:6px 0 10px;padding:0;font-size:14px}
.legend{font-weight:400}.legend li{display:inline-flex;align-items:center;gap:6px}
.mark{width:14px;height:14px;flex:none}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:6px 10px 6px 0;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--soft)}
td.number,th.number{text-align:right;white-space:nowrap}
td b{font-weight:650}.rows td b{white-space:nowrap}
.rows td:first-child,.rows th:first-child{min-width:84px}.rows td:nth-child(3){min-width:90px}
.peaks td:first-child{width:26%}
.bars{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,170px),1fr));gap:8px 18px}
.bar{height:6px;border-radius:3px;background:currentColor;margin:1px 0 2px;min-width:2px}
.heat{border-collapse:separate;border-spacing:2px;width:auto}
.heat td,.heat th{border:0;padding:6px 8px;text-align:center;font-size:13px;white-space:nowrap;border-radius:4px}
.heat td.none{border:1px dashed var(--axis)}
.heat .light{color:#000}.heat .dark{color:#fff}
.tag{display:inline-block;border:1px solid var(--axis);border-radius:99px;padding:0 8px;font-size:12px;color:var(--soft);white-space:nowrap}
.verdict{font-weight:600}
details{margin:10px 0}summary{cursor:pointer;color:var(--accent);font-size:14px}
ol.notes{font-size:14px;color:var(--soft);padding-left:22px;max-width:90ch}
footer{margin-top:48px;padding-bottom:40px;color:var(--soft);font-size:13px}
@media (max-width:700px){
main,header,footer{padding-left:14px;padding-right:14px}
h1{font-size:24px}h2{font-size:20px}
.rows thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.rows,.rows tbody{display:block}
.rows tr{display:block;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:8px 12px;margin:0 0 10px}
.rows td{display:block;border:0;padding:3px 0;overflow-wrap:anywhere}
.rows td.number{text-align:left;white-space:normal}
.rows td[data-label]::before{content:attr(data-label);display:block;color:var(--soft);font-size:12px}
.rows td:empty{display:none}
.bars{grid-template-columns:1fr 1fr}.peaks td:first-child{width:auto;font-weight:600}.peaks td:first-child .of{font-weight:400}
}
@media print{
body{font-size:11pt}main,header,footer{max-width:none;padding:0}
nav,details{display:none}
h2,h3,h4{break-after:avoid}tr,.card,.warn{break-inside:avoid}
.charts{grid-template-columns:1fr 1fr}.bars{grid-template-columns:1fr 1fr 1fr}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
@page{margin:14mm}
}
";

/// Returns the style sheet.
pub fn css() -> String {
    type Text = fn(Color) -> String;
    let mut css = String::new();
    let variables = |of: Text| {
        let variable = |(name, color): &(&str, Color)| format!("--{name}:{};", of(*color));
        NAMES.iter().map(variable).collect::<String>()
    };
    let classes = |of: Text| {
        let series = SERIES.iter().enumerate();
        let series = series.map(|(look, color)| format!(".s{look}{{color:{}}}", of(*color)));
        let kinds = KINDS.iter().enumerate();
        let kinds = kinds.map(|(kind, color)| format!(".k{kind}{{color:{}}}", of(*color)));
        series.chain(kinds).collect::<String>()
    };
    let (light, dark): (Text, Text) = (Color::light_text, Color::dark_text);
    // Writing to a String cannot fail.
    let _ = writeln!(css, ":root{{{}}}{}", variables(light), classes(light));
    css.push_str(RULES);
    let _ = write!(
        css,
        "@media screen and (prefers-color-scheme:dark){{:root{{{}}}{}",
        variables(dark),
        classes(dark)
    );
    // Charts have light colors as attributes.
    for color in of_charts() {
        let (from, to) = (color.light_text(), color.dark_text());
        let _ = write!(
            css,
            "svg.chart [fill=\"{from}\"]{{fill:{to}}}svg.chart [stroke=\"{from}\"]{{stroke:{to}}}"
        );
    }
    css.push_str("}\n");
    css
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_style_asks_for_nothing_from_elsewhere_and_has_both_schemes() {
        let css = css();
        for word in ["url(", "@import", "http"] {
            assert!(!css.contains(word), "{word}");
        }
        assert!(css.contains("prefers-color-scheme:dark") && css.contains("@media print"));
        assert_eq!(css.matches('{').count(), css.matches('}').count());
    }
}
