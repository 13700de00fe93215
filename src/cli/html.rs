//! Self-contained pages: one file, no scripts, nothing loaded from elsewhere; light and dark by the reader's setting.

use std::fmt::Write;

/// Colours and layout; wide pictures scroll inside their own box.
const STYLE: &str = "
:root{color-scheme:light dark;--bg:#fbfbfa;--fg:#1d2127;--dim:#5d6570;--line:#d9dce1;--accent:#1f5fae;--second:#b8540f}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--fg:#e4e7eb;--dim:#98a1ad;--line:#333a43;--accent:#79b4ff;--second:#ffab6b}}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px 16px 40px;max-width:1240px;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 2px}
p{margin:0 0 10px;max-width:76ch}
.dim,figcaption{color:var(--dim);font-size:13px}
.lead{font-size:16px;margin-bottom:20px}
.row{display:flex;flex-wrap:wrap;gap:28px 40px;align-items:flex-start}
figure{margin:0 0 24px;max-width:100%;min-width:0}
figcaption{max-width:60ch;margin-bottom:8px}
.scroll{overflow-x:auto;max-width:100%}
svg{display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--dim)}
svg text.hi{fill:var(--bg)}svg text.lo{fill:var(--fg)}
.grid{stroke:var(--line)}.cell{fill:var(--accent)}
.first{fill:var(--accent);stroke:var(--accent)}.second{fill:none;stroke:var(--second)}
.mean{stroke:var(--fg);stroke-width:2}.span{stroke:var(--accent);stroke-opacity:.45;stroke-width:2}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--dim);font-weight:600}
section{margin-top:36px;border-top:1px solid var(--line);padding-top:18px}
section figure{width:356px}
h2.title{font-size:19px;margin:0 0 8px;overflow-wrap:anywhere}
ul{padding-left:18px}li{margin-bottom:7px;break-inside:avoid}
ul.remarks{margin:18px 0 22px;columns:430px 2;column-gap:44px;font-size:14px}
.words td:first-child,.words th:first-child{text-align:left}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 16px;font-size:13px}
.legend span{display:inline-flex;align-items:center;gap:6px}
:root{--p0:#1f5fae;--p1:#0f9aa8;--p2:#3d8b37;--p3:#c8321f;--p4:#d98a00;--p5:#7b4fb0}
@media(prefers-color-scheme:dark){:root{--p0:#79b4ff;--p1:#4fd3dc;--p2:#86d67f;--p3:#ff7d6b;--p4:#ffc24d;--p5:#c59dff}}
.p0{--c:var(--p0)}.p1{--c:var(--p1)}.p2{--c:var(--p2)}.p3{--c:var(--p3)}.p4{--c:var(--p4)}.p5{--c:var(--p5)}
.curve{fill:none;stroke:var(--c,var(--fg));stroke-width:1.8;stroke-linejoin:round}
.dot{fill:var(--c,var(--fg))}.faint{fill-opacity:.4}
.bar{stroke:var(--c);stroke-width:7;stroke-opacity:.25}.mark{stroke:var(--c);stroke-width:2.5}
.limit{stroke:var(--fg);stroke-dasharray:2 3}.bad{fill:var(--p3)}.fits{fill:var(--line);fill-opacity:.45}
";

/// A page under construction.
pub struct Page {
    title: String,
    body: String,
}

impl Page {
    /// A page with a title, a line under it, and the summary that is read first.
    pub fn new(title: &str, line: &str, summary: &str) -> Self {
        let mut body = String::new();
        let _ = write!(
            body,
            "<h1>{}</h1>\n<p class=\"dim\">{}</p>\n<p class=\"lead\">{}</p>\n",
            escape(title),
            escape(line),
            escape(summary)
        );
        Self { title: title.to_owned(), body }
    }

    /// Starts a part of the page with its title.
    pub fn section(&mut self, title: &str) {
        let _ = write!(self.body, "<section>\n<h2 class=\"title\">{}</h2>\n", escape(title));
    }

    /// Adds a paragraph.
    pub fn paragraph(&mut self, text: &str) {
        let _ = writeln!(self.body, "<p>{}</p>", escape(text));
    }

    /// Adds lines that are read first, one below the other.
    pub fn lines(&mut self, lines: &[String]) {
        self.items("lines", lines);
    }

    /// Adds remarks, side by side where there is room.
    pub fn list(&mut self, remarks: &[String]) {
        self.items("remarks", remarks);
    }

    fn items(&mut self, class: &str, items: &[String]) {
        let _ = writeln!(self.body, "<ul class=\"{class}\">");
        for item in items {
            let _ = writeln!(self.body, "<li>{}</li>", escape(item));
        }
        self.body.push_str("</ul>\n");
    }

    /// Ends the part.
    pub fn end_section(&mut self) {
        self.body.push_str("</section>\n");
    }

    /// Adds markup between figures.
    pub fn raw(&mut self, markup: &str) {
        self.body.push_str(markup);
    }

    /// Adds figures side by side; they wrap where the window is narrow. `content` is markup.
    pub fn figures(&mut self, figures: &[Figure]) {
        self.body.push_str("<div class=\"row\">\n");
        for figure in figures {
            let _ = write!(
                self.body,
                "<figure>\n<h2>{}</h2>\n<figcaption>{}</figcaption>\n<div class=\"scroll\">{}</div>\n</figure>\n",
                escape(&figure.title),
                escape(&figure.caption),
                figure.content
            );
        }
        self.body.push_str("</div>\n");
    }

    /// The whole page.
    pub fn render(&self) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
             <title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{}</body>\n</html>\n",
            escape(&self.title),
            self.body
        )
    }
}

/// A picture or table with its title and caption.
pub struct Figure {
    /// Plain text.
    pub title: String,
    /// Plain text.
    pub caption: String,
    /// Markup.
    pub content: String,
}

/// Text as it may stand in markup and in attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && c != '\n' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// A table; the first row is the head. Cells are plain text.
pub fn html_table(rows: &[Vec<String>]) -> String {
    let mut out = String::from("<table>\n");
    for (place, row) in rows.iter().enumerate() {
        let tag = if place == 0 { "th" } else { "td" };
        out.push_str("<tr>");
        for cell in row {
            let _ = write!(out, "<{tag}>{}</{tag}>", escape(cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table>");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_strangers_stay_text() {
        let page = Page::new("<script>alert('x')</script>", "a & b", "\"quoted\"").render();
        assert!(!page.contains("<script"));
        assert!(page.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;"));
        assert!(page.contains("a &amp; b") && page.contains("&quot;quoted&quot;"));
    }
}
