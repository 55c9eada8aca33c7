//! A self-contained HTML page without scripts or network access. It follows the light or dark mode of the
//! reader's system.

use orchestrate_types::is_unprintable;
use std::fmt::Write;

const STYLE: &str = "\
:root{color-scheme:light dark;--paper:#fff;--ink:#1c1c1c;--soft:#5c5c5c;--rule:#e4e4e4;--card:#f6f7f8;\
--good:#2f7d32;--bad:#b3261e;--c0:#0b62a4;--c1:#c44e00;--c2:#4a7a1d;--c3:#7b3fa0;--c4:#a07400;\
--c5:#00838f;--c6:#c2185b;--c7:#6d4c41}\
@media(prefers-color-scheme:dark){:root{--paper:#15171a;--ink:#e6e6e6;--soft:#a0a4a8;--rule:#2f3338;\
--card:#1e2126;--good:#81c784;--bad:#ff8a80;--c0:#6fb3e8;--c1:#ff9e64;--c2:#a3cf6e;--c3:#c99be8;\
--c4:#e6c35c;--c5:#5fd0d8;--c6:#ff86b2;--c7:#c7a08f}}\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;\
color:var(--ink);background:var(--paper)}h1{font-size:1.5rem;margin-bottom:.2rem}\
h2{font-size:1.1rem;margin:2.2rem 0 .6rem;border-bottom:1px solid var(--rule)}\
p.lead{margin:.2rem 0 1rem;color:var(--soft)}\
.verdict{font-weight:600}.good{color:var(--good)}.bad{color:var(--bad)}\
.tiles{display:flex;flex-wrap:wrap;gap:.8rem;margin:1rem 0}\
.tile{background:var(--card);border-radius:.5rem;padding:.6rem 1rem;min-width:9rem}\
.tile b{display:block;font-size:1.35rem;font-weight:600}.tile small,.tile span{color:var(--soft)}\
.wide{overflow-x:auto}table{border-collapse:collapse}td,th{padding:.25rem .9rem .25rem 0;\
text-align:left;border-bottom:1px solid var(--rule);font-weight:normal;white-space:nowrap}\
th{color:var(--soft)}.charts{display:grid;gap:1.4rem;\
grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr))}figure{margin:0}\
figcaption{font-weight:600}.note{margin:.1rem 0 0;color:var(--soft);font-size:.85rem}\
figure>svg{width:100%;height:auto}svg text{font-size:10px;fill:var(--soft)}\
.rule{stroke:var(--rule)}.mark{stroke:var(--bad);stroke-dasharray:4 4}path{fill:none;stroke-width:1.7}\
.key{list-style:none;margin:0;padding:0;display:flex;flex-wrap:wrap;gap:0 1rem;font-size:.85rem}\
.key svg{width:22px;height:8px;margin-right:.35rem}.key line{stroke-width:2}\
.l0{stroke:var(--c0)}.l1{stroke:var(--c1)}.l2{stroke:var(--c2)}.l3{stroke:var(--c3)}\
.l4{stroke:var(--c4)}.l5{stroke:var(--c5)}.l6{stroke:var(--c6)}.l7{stroke:var(--c7)}\
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}\
.f4{fill:var(--c4)}.f5{fill:var(--c5)}.f6{fill:var(--c6)}.f7{fill:var(--c7)}";

/// The whole document with `body` under its title.
pub(crate) fn document(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n{body}\
         </body></html>\n"
    )
}

/// Figures under a heading; an empty string if all figures are empty.
pub(crate) fn section(heading: &str, figures: &[String]) -> String {
    let figures = figures.concat();
    if figures.is_empty() {
        return String::new();
    }
    format!("<h2>{}</h2>\n<div class=\"charts\">\n{figures}</div>\n", escape(heading))
}

/// A number at the top of the page.
#[derive(Debug)]
pub(crate) struct Tile {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    pub(crate) note: String,
}

/// A row of tiles.
pub(crate) fn tiles(tiles: &[Tile]) -> String {
    let mut out = String::from("<div class=\"tiles\">");
    for tile in tiles {
        let _ = write!(
            out,
            "<div class=\"tile\"><span>{}</span><b>{}</b><small>{}</small></div>",
            escape(tile.name),
            escape(&tile.value),
            escape(&tile.note)
        );
    }
    out.push_str("</div>\n");
    out
}

/// A table with a header, which may be empty.
pub(crate) fn table(header: &[String], rows: &[Vec<String>]) -> String {
    let mut out = String::from("<div class=\"wide\"><table>\n");
    let mut put = |cells: &[String], tag: &str| {
        out.push_str("<tr>");
        for cell in cells {
            let _ = write!(out, "<{tag}>{}</{tag}>", escape(cell));
        }
        out.push_str("</tr>\n");
    };
    if !header.is_empty() {
        put(header, "th");
    }
    for row in rows {
        put(row, "td");
    }
    out.push_str("</table></div>\n");
    out
}

/// Escapes the characters of `text` that are markup in HTML, and those that are invisible or change the
/// direction of text.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\n' | '\t' => escaped.push(c),
            c if is_unprintable(c) => escaped.extend(c.escape_default()),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn untrusted_text_is_escaped() {
        let row = vec!["<script>".to_owned(), "\"&".to_owned()];
        let page = document("a<b", &table(&row, std::slice::from_ref(&row)));
        assert!(!page.contains("<script") && page.contains("&lt;script&gt;"), "{page}");
        assert!(page.contains("<title>a&lt;b</title>") && page.contains("&quot;&amp;"));
        assert_eq!(
            escape("' onload='\u{1b}[2J\u{202e}\u{200b}\r"),
            "&#39; onload=&#39;\\u{1b}[2J\\u{202e}\\u{200b}\\r"
        );
        assert_eq!(section("empty", &[String::new()]), "");
    }
}
