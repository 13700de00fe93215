//! Self-contained pages: one file, no scripts, nothing loaded from elsewhere; light and dark by the reader's setting.

use super::output::is_unprintable;
pub use super::terminal::Tone;
use super::terminal::parts;
use std::ffi::OsString;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Colors and layout; wide pictures scroll inside their own box.
const STYLE: &str = "
:root{color-scheme:light dark;--bg:#fbfbfa;--fg:#1d2127;--dim:#5d6570;--line:#d9dce1;--accent:#1f5fae;--second:#b8540f;--shade:rgba(20,30,45,.28)}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--fg:#e4e7eb;--dim:#98a1ad;--line:#333a43;--accent:#79b4ff;--second:#ffab6b;--shade:rgba(210,225,255,.30)}}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px 16px 40px;max-width:1240px;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 2px}
p{margin:0 0 10px;max-width:76ch;overflow-wrap:anywhere}
.dim,figcaption{color:var(--dim);font-size:13px}
.lead{font-size:16px;margin-bottom:20px}
.row{display:flex;flex-wrap:wrap;gap:28px 40px;align-items:flex-start}
figure{margin:0 0 24px;max-width:100%;min-width:0}
figcaption{max-width:60ch;margin-bottom:8px}
.made{max-width:100%;margin-top:24px;color:var(--dim);font-size:13px;overflow-wrap:anywhere}code{font:12px ui-monospace,monospace}.option{white-space:nowrap}
.verdict{font-size:16px;font-weight:600;border-left:5px solid var(--accent);padding:4px 12px;max-width:90ch}
.good{border-color:var(--p2)}.bad-news{border-color:var(--p3)}
.next{max-width:none}.scroll+.dim{margin-top:8px}
.next code{font-size:13px;background:var(--line);padding:3px 6px;border-radius:3px}
.tone-good{color:var(--p2)}.tone-bad{color:var(--p3);font-weight:600}.tone-plain{color:var(--p4)}
tr:has(.tone-bad){background:color-mix(in srgb,var(--p3) 9%,transparent)}
summary{cursor:pointer;margin:8px 0;color:var(--accent)}
nav{font-size:14px;margin:14px 0 22px}nav a{color:var(--accent);margin-right:18px;display:inline-block}
.scroll{overflow-x:auto;max-width:100%;
background:linear-gradient(to right,var(--bg) 40%,transparent) left/48px 100%,linear-gradient(to left,var(--bg) 40%,transparent) right/48px 100%,
linear-gradient(to right,var(--shade),transparent) left/16px 100%,linear-gradient(to left,var(--shade),transparent) right/16px 100%;
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}
.hint{display:none;color:var(--dim);font-size:13px;margin:0 0 4px}
@media(max-width:760px){.hint{display:block}}
svg{display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--dim)}
svg text.small{font-size:10px}svg text.hi{fill:var(--bg)}svg text.lo{fill:var(--fg)}
.grid{stroke:var(--line)}.cell{fill:var(--accent)}
.first{fill:var(--accent);stroke:var(--accent)}.second{fill:none;stroke:var(--second)}
.mean{stroke:var(--fg);stroke-width:2}.span{stroke:var(--accent);stroke-opacity:.45;stroke-width:2}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
@media(max-width:760px){th,td{padding:3px 5px}}
th{color:var(--dim);font-weight:600;white-space:normal;vertical-align:bottom}
section{margin-top:36px;border-top:1px solid var(--line);padding-top:18px}
section figure{width:356px}
h2.title{font-size:19px;margin:0 0 8px;overflow-wrap:anywhere}
ul{padding-left:18px}li{margin-bottom:7px;break-inside:avoid;overflow-wrap:anywhere}
ul.remarks{margin:18px 0 22px;columns:430px 2;column-gap:44px;font-size:14px}
.words td:first-child,.words th:first-child{text-align:left}
.reasons td:last-child,.reasons th:last-child{text-align:left;white-space:normal;min-width:280px}
@media(max-width:760px){
.reasons table,.reasons tbody,.reasons tr{display:grid;grid-column:1/-1}
.reasons table{grid-template-columns:repeat(var(--short),auto)}.reasons tbody,.reasons tr{grid-template-columns:subgrid}
.reasons td{border:0}.reasons tr{border-bottom:1px solid var(--line)}
.reasons th:last-child{display:none}.reasons td:last-child{grid-column:1/-1;min-width:0;overflow-wrap:anywhere}}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 16px;font-size:13px}
.legend span{display:inline-flex;align-items:center;gap:6px}
:root{--p0:#1f5fae;--p1:#0f9aa8;--p2:#3d8b37;--p3:#c8321f;--p4:#d98a00;--p5:#7b4fb0}
@media(prefers-color-scheme:dark){:root{--p0:#79b4ff;--p1:#4fd3dc;--p2:#86d67f;--p3:#ff7d6b;--p4:#ffc24d;--p5:#c59dff}}
.p0{--c:var(--p0)}.p1{--c:var(--p1)}.p2{--c:var(--p2)}.p3{--c:var(--p3)}.p4{--c:var(--p4)}.p5{--c:var(--p5)}
.curve{fill:none;stroke:var(--c,var(--fg));stroke-width:1.8;stroke-linejoin:round}.under{stroke-opacity:.38}
.dot{fill:var(--c,var(--fg))}.open{fill:none;stroke:var(--c)}.faint{fill-opacity:.4}
.bar{stroke:var(--c);stroke-width:7;stroke-opacity:.25}.mark{stroke:var(--c);stroke-width:2.5}
.limit{stroke:var(--fg);stroke-dasharray:2 3}.bad{fill:var(--p3)}.fits{fill:var(--line)}
";

/// What a page says of its origin: by which command line it was made, where there was one.
pub struct Made {
    command: Option<String>,
}

impl Made {
    /// By a command line, the command's name first.
    pub fn by(args: &[OsString]) -> Self {
        let word = |(place, arg): (usize, &OsString)| match place {
            0 => "sigmascale".to_owned(),
            _ => quoted(&arg.to_string_lossy()),
        };
        Self { command: Some(args.iter().enumerate().map(word).collect::<Vec<_>>().join(" ")) }
    }

    /// By a program that uses the library.
    pub fn by_library() -> Self {
        Self { command: None }
    }

    /// Tool, version, date and command, on one line of markup.
    fn line(&self) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let command = self.command.as_ref().map_or(String::new(), |text| format!(", {}", code(text)));
        format!("<p class=\"made\">sigmascale {}, {}{command}</p>\n", env!("CARGO_PKG_VERSION"), date(now))
    }
}

/// An argument as a POSIX shell reads it back.
pub fn quoted(arg: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./,:=+@%".contains(c);
    if !arg.is_empty() && arg.chars().all(plain) { arg.to_owned() } else { format!("'{}'", arg.replace('\'', "'\\''")) }
}

/// Seconds since 1970 as `2026-11-23 11:40 UTC`.
fn date(seconds: u64) -> String {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut days = seconds / 86_400;
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 0;
    for length in [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        month += 1;
        if days < length {
            break;
        }
        days -= length;
    }
    let minutes = seconds / 60 % 1440;
    format!("{year}-{month:02}-{:02} {:02}:{:02} UTC", days + 1, minutes / 60, minutes % 60)
}

/// A page under construction.
pub struct Page {
    title: String,
    head: String,
    body: String,
    sections: Vec<String>,
    figures: Vec<String>,
}

impl Page {
    /// A page with a title, a line under it, and the summary that is read first (may be empty).
    pub fn new(title: &str, line: &str, summary: &str) -> Self {
        let mut head = String::new();
        let _ = write!(head, "<h1>{}</h1>\n<p class=\"dim\">{}</p>\n", escape(title), escape(line));
        let lead = |text| format!("<p class=\"lead\">{}</p>\n", prose(text));
        let body = Some(summary).filter(|text| !text.is_empty()).map_or_else(String::new, lead);
        Self { title: title.to_owned(), head, body, sections: vec![], figures: vec![] }
    }

    /// Sets the result in a sentence, above everything else.
    pub fn verdict(&mut self, tone: Tone, text: &str) {
        let class = match tone {
            Tone::Good => " good",
            Tone::Bad => " bad-news",
            Tone::Plain => "",
        };
        let _ = writeln!(self.head, "<p class=\"verdict{class}\">{}</p>", prose(text));
    }

    /// Sets the command that comes next, below the verdict.
    pub fn next(&mut self, command: &str) {
        let _ = writeln!(self.head, "<p class=\"next\">Next: {}</p>", code(command));
    }

    /// Adds a table. `class` is `words` where the first column holds words, `reasons` where the last one does.
    pub fn table<const N: usize>(&mut self, class: &str, heads: &[&str; N], rows: impl Iterator<Item = [String; N]>) {
        self.body.push_str(&table(class, heads, rows));
    }

    /// Starts a part of the page with its title.
    pub fn section(&mut self, title: &str) {
        self.sections.push(title.to_owned());
        let id = self.sections.len();
        let _ = write!(self.body, "<section id=\"s{id}\">\n<h2 class=\"title\">{}</h2>\n", escape(title));
    }

    /// Adds what is read by few: under a title that opens it.
    pub fn fold(&mut self, title: &str, content: impl FnOnce(&mut Self)) {
        let _ = writeln!(self.body, "<details><summary>{}</summary>", escape(title));
        content(self);
        self.body.push_str("</details>\n");
    }

    /// Adds a paragraph.
    pub fn paragraph(&mut self, text: &str) {
        let _ = writeln!(self.body, "<p>{}</p>", prose(text));
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
            let _ = writeln!(self.body, "<li>{}</li>", prose(item));
        }
        self.body.push_str("</ul>\n");
    }

    /// Ends the part.
    pub fn end_section(&mut self) {
        self.body.push_str("</section>\n");
    }

    /// Adds a remark in small print.
    pub fn note(&mut self, text: &str) {
        let _ = writeln!(self.body, "<p class=\"dim\">{}</p>", prose(text));
    }

    /// Adds markup between figures.
    pub fn raw(&mut self, markup: &str) {
        self.body.push_str(markup);
    }

    /// Adds figures side by side; they wrap where the window is narrow. `content` is markup.
    pub fn figures(&mut self, figures: &[Figure]) {
        self.body.push_str("<div class=\"row\">\n");
        for figure in figures {
            self.figures.push(figure.title.clone());
            let _ = write!(
                self.body,
                "<figure id=\"f{}\">\n<h2>{}</h2>\n<figcaption>{}</figcaption>\n<div class=\"scroll\">{}</div>\n</figure>\n",
                self.figures.len(),
                escape(&figure.title),
                escape(&figure.caption),
                figure.content
            );
        }
        self.body.push_str("</div>\n");
    }

    /// Links to the sections; to the figures of a page with a single section.
    fn contents(&self) -> String {
        let (titles, prefix) = if self.sections.len() > 1 { (&self.sections, 's') } else { (&self.figures, 'f') };
        if titles.len() < 2 {
            return String::new();
        }
        let link =
            |(place, title): (usize, &String)| format!("<a href=\"#{prefix}{}\">{}</a>", place + 1, escape(title));
        format!("<nav aria-label=\"Contents\">{}</nav>\n", titles.iter().enumerate().map(link).collect::<String>())
    }

    /// The whole page.
    pub fn render(&self, made: &Made) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
             <title>{}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{}{}{}{}</body>\n</html>\n",
            escape(&self.title),
            self.head,
            self.contents(),
            self.body,
            made.line()
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

impl Figure {
    /// A picture under its title and caption.
    pub fn new(title: impl Into<String>, caption: impl Into<String>, content: String) -> Self {
        Self { title: title.into(), caption: caption.into(), content }
    }
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
            c if is_unprintable(c) && c != '\n' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// Sentences as markup, what they set in backticks as code.
fn prose(text: &str) -> String {
    let parts: Vec<_> = text.split('`').collect();
    if parts.len().is_multiple_of(2) {
        return escape(text); // a backtick of a name
    }
    let part = |(place, part): (usize, &&str)| if place % 2 == 0 { escape(part) } else { code(part) };
    parts.iter().enumerate().map(part).collect()
}

/// A command or a name as markup. Browsers break lines inside of `--option` if they may.
fn code(text: &str) -> String {
    let word = |word: &str| {
        let markup = escape(word);
        let option = word.starts_with("--") && !word.contains('=');
        if option { format!("<span class=\"option\">{markup}</span>") } else { markup }
    };
    format!("<code>{}</code>", text.split(' ').map(word).collect::<Vec<_>>().join(" "))
}

/// Text with the colors of its verdicts, as markup.
fn toned_markup(text: &str) -> String {
    let part = |(tone, text): (Option<Tone>, String)| {
        let class = match tone {
            Some(Tone::Good) => "tone-good",
            Some(Tone::Bad) => "tone-bad",
            Some(Tone::Plain) => "tone-plain",
            None => return escape(&text),
        };
        format!("<span class=\"{class}\">{}</span>", escape(&text))
    };
    parts(text).into_iter().map(part).collect()
}

/// A table of text, which scrolls sideways where it is wider than the window, and says so on a phone. There the reasons of
/// `reasons` have lines of their own.
pub fn table<const N: usize>(class: &str, heads: &[&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let row = |tag: &str, cells: &[String; N]| {
        let cells: String = cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", toned_markup(cell))).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let rows: String = rows.map(|cells| row("td", &cells)).collect();
    let hint = if class == "reasons" { "" } else { "<p class=\"hint\">The table scrolls sideways.</p>\n" };
    format!(
        "{hint}<div class=\"scroll {class}\" style=\"--short:{}\" tabindex=\"0\" role=\"region\" aria-label=\"Table\">\
         <table>\n{}{rows}</table></div>\n",
        N - 1,
        row("th", &heads.map(str::to_owned))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_strangers_stay_text() {
        let page = Page::new("<script>alert('x')</script>", "a & b", "\"quoted\"")
            .render(&Made::by(&["x".into(), "<b>".into()]));
        assert!(!page.contains("<script"));
        assert!(page.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;"));
        assert!(page.contains("a &amp; b") && page.contains("&quot;quoted&quot;"));
        assert!(page.contains("<code>sigmascale &#39;&lt;b&gt;&#39;</code>") && !page.contains("<b>"));
    }

    #[test]
    fn backticks_in_pairs_are_code() {
        assert_eq!(prose("set `a<b>` to `c`"), "set <code>a&lt;b&gt;</code> to <code>c</code>");
        assert_eq!(prose("run `x --to <b>`"), "run <code>x <span class=\"option\">--to</span> &lt;b&gt;</code>");
        assert_eq!(prose("a folder it`s"), "a folder it`s");
    }

    #[test]
    fn dates_and_commands_read_as_people_and_shells_write_them() {
        let cases = [
            (0, "1970-01-01 00:00 UTC"),
            (951_868_799, "2000-02-29 23:59 UTC"),
            (1_709_251_200, "2024-03-01 00:00 UTC"),
            (4_107_542_399, "2100-02-28 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ];
        for (seconds, text) in cases {
            assert_eq!(date(seconds), text);
        }
        assert_eq!(["a/b.json", "it's", ""].map(quoted), ["a/b.json", "'it'\\''s'", "''"]);
    }

    #[test]
    fn contents_link_to_sections_or_figures() {
        let figure = |title: &str| Figure::new(title, "", String::new());
        let mut page = Page::new("t", "", "");
        page.section("one");
        page.figures(&[figure("a"), figure("b")]);
        page.end_section();
        assert!(page.render(&Made::by_library()).contains("<a href=\"#f2\">b</a>"));
        page.section("two");
        let page = page.render(&Made::by_library());
        assert!(page.contains("<a href=\"#s2\">two</a>") && page.contains("<section id=\"s2\">"));
        assert!(!page.contains("href=\"#f"));
    }
}
