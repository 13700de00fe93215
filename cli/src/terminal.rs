//! Where the result is read: the width and the colors of a terminal, or none of both in a pipe or a file.

use console::{Style, Term};
use std::sync::atomic::{AtomicBool, Ordering};

/// Columns of prose in a pipe or a file, and the most of a terminal.
const PROSE: usize = 118;

/// Less than this is not read by people.
const LEAST: usize = 40;

/// How a verdict is colored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// Nothing can overflow, or nothing did.
    Good,
    /// Something can overflow, or did.
    Bad,
    /// Neither.
    Plain,
}

static TO_FILE: AtomicBool = AtomicBool::new(false);

/// The result goes to a file.
pub fn write_to_file() {
    TO_FILE.store(true, Ordering::Relaxed);
}

/// Columns of the terminal that shows the result; `None` in a pipe or a file, where tables are as wide as they are.
pub fn columns() -> Option<usize> {
    if TO_FILE.load(Ordering::Relaxed) {
        return None;
    }
    Term::stdout().size_checked().map(|(_, columns)| usize::from(columns).max(LEAST))
}

/// Columns of prose.
pub fn width() -> usize {
    columns().map_or(PROSE, |columns| columns.min(PROSE))
}

/// What stands around text that has a color until it is written: characters that no font has, so that widths and the removal of
/// control characters do not depend on colors.
const MARKS: [(Tone, char); 3] = [(Tone::Good, '\u{f0001}'), (Tone::Bad, '\u{f0002}'), (Tone::Plain, '\u{f0003}')];
const END: char = '\u{f0000}';

/// Text in the color of a verdict, where colors are shown: [`painted`] brings it out.
pub fn toned(tone: Tone, text: &str) -> String {
    let mark = MARKS.into_iter().find(|(of, _)| *of == tone).map_or(END, |(_, mark)| mark);
    let (text, end) = text.split_at(text.trim_end_matches('\n').len());
    format!("{mark}{text}{END}{end}")
}

/// Text with its colors, as NO_COLOR, CLICOLOR and CLICOLOR_FORCE allow them.
pub fn painted(text: &str) -> String {
    let colors = !TO_FILE.load(Ordering::Relaxed) && console::colors_enabled();
    paint(text, colors)
}

fn paint(text: &str, colors: bool) -> String {
    let style = |tone| match tone {
        Tone::Good => Style::new().green(),
        Tone::Bad => Style::new().red().bold(),
        Tone::Plain => Style::new().yellow(),
    };
    let painted = |(tone, text): (Option<Tone>, String)| match tone {
        Some(tone) => style(tone).force_styling(colors).apply_to(text).to_string(),
        None => text,
    };
    parts(text).into_iter().map(painted).collect()
}

/// Text without its marks, in parts that have the color of a verdict or none.
pub fn parts(text: &str) -> Vec<(Option<Tone>, String)> {
    let mut out = Vec::new();
    let mut rest = text;
    while let Some((at, tone)) =
        rest.char_indices().find_map(|(at, c)| MARKS.iter().find(|(_, mark)| *mark == c).map(|(tone, _)| (at, *tone)))
    {
        let inside = &rest[at + MARKS[0].1.len_utf8()..];
        let (inside, after) = inside.split_once(END).unwrap_or((inside, ""));
        out.extend([(None, rest[..at].replace(END, "")), (Some(tone), inside.to_owned())]);
        rest = after;
    }
    out.push((None, rest.replace(END, "")));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_colored_where_colors_are_shown() {
        let text = format!("before {} after\n{}", toned(Tone::Bad, "NOT SAFE\n"), toned(Tone::Good, "safe"));
        assert_eq!(paint(&text, false), "before NOT SAFE\n after\nsafe");
        let colored = paint(&text, true);
        assert!(colored.contains("\u{1b}[31m\u{1b}[1mNOT SAFE\u{1b}[0m\n"), "{colored:?}");
        assert!(colored.ends_with("\u{1b}[32msafe\u{1b}[0m"), "{colored:?}");
        // A name from a file may hold such a character.
        assert_eq!(paint("a\u{f0001}b\u{f0000}\u{f0000}", false), "ab");
    }
}
