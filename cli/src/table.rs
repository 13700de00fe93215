//! Aligned text tables, wrapped text and short numbers.

use super::terminal;

/// A table of right-aligned columns.
pub struct Table {
    rows: Vec<Vec<String>>,
    left: bool,
    left_last: bool,
}

impl Table {
    /// A table with these column heads.
    pub fn new<const N: usize>(heads: [&str; N]) -> Self {
        Self { rows: vec![heads.map(str::to_owned).to_vec()], left: false, left_last: false }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.to_vec());
    }

    /// The table with one more row.
    pub fn with<const N: usize>(mut self, cells: [String; N]) -> Self {
        self.row(cells);
        self
    }

    /// The first column holds words: aligned to the left.
    pub fn left(mut self) -> Self {
        self.left = true;
        self
    }

    /// The last column holds words: aligned to the left.
    pub fn left_last(mut self) -> Self {
        self.left_last = true;
        self
    }

    /// The text, a line per row; on a terminal that is too narrow, folded.
    pub fn render(&self) -> String {
        self.within(terminal::columns())
    }

    /// At most this wide, if it can be: words at the end of rows are wrapped; otherwise columns come in several blocks, each
    /// behind the first one.
    fn within(&self, limit: Option<usize>) -> String {
        let count = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| self.rows.iter().filter_map(|row| row.get(c)).map(|cell| visible(cell)).max();
        let widths: Vec<usize> = (0..count).map(|c| width(c).unwrap_or(0)).collect();
        let all: Vec<usize> = (0..count).collect();
        let taken = |columns: &[usize]| columns.iter().map(|c| widths[*c] + 2).sum::<usize>().saturating_sub(2);
        let Some(limit) = limit.filter(|limit| taken(&all) > *limit && count > 1) else {
            return self.block(&all, &widths, None);
        };
        let words = (count - 1, limit.saturating_sub(taken(&all[..count - 1]) + 2));
        if self.left_last && words.1 >= LEAST_WORDS {
            return self.block(&all, &widths, Some(words.1));
        }
        let mut blocks: Vec<Vec<usize>> = vec![vec![0]];
        for (column, width) in widths.iter().enumerate().skip(1) {
            let fits = |block: &Vec<usize>| block.len() == 1 || taken(block) + 2 + width <= limit;
            match blocks.last_mut().filter(|block| fits(block)) {
                Some(block) => block.push(column),
                None => blocks.push(vec![0, column]),
            }
        }
        let text = blocks.iter().map(|block| {
            let room = limit.saturating_sub(taken(&block[..block.len() - 1]) + 2).max(LEAST_WORDS);
            self.block(block, &widths, Some(room))
        });
        text.collect::<Vec<_>>().join("\n")
    }

    /// These columns of all rows. `words`: columns for the text at the end of a row.
    fn block(&self, columns: &[usize], widths: &[usize], words: Option<usize>) -> String {
        let mut out = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (place, column) in columns.iter().enumerate() {
                let (cell, width) = (row.get(*column).map_or("", String::as_str), widths[*column]);
                if place > 0 {
                    line.push_str("  ");
                }
                let pad = " ".repeat(width.saturating_sub(visible(cell)));
                if self.left && *column == 0 {
                    line.push_str(&format!("{cell}{pad}"));
                } else if self.left_last && *column + 1 == widths.len() {
                    let before = visible(&line);
                    let text = words.map(|words| wrap(cell, before, before + words));
                    line.push_str(text.as_deref().unwrap_or(cell));
                } else {
                    line.push_str(&format!("{pad}{cell}"));
                }
            }
            out.push_str(&line);
            out.push('\n');
        }
        out
    }
}

/// Columns that text takes, without the marks of its colors.
fn visible(text: &str) -> usize {
    terminal::parts(text).iter().map(|(_, part)| part.chars().count()).sum()
}

/// Rows of a table, unless all are asked for: with what stands around them they fit a screen.
pub const ROWS: usize = 24;

/// The rows that a table shows, in their order: all, or the `most` with the largest value; and a line about the others.
pub fn largest<'r, T>(rows: &'r [T], most: usize, of: &str, value: impl Fn(&T) -> Option<f64>) -> (Vec<&'r T>, String) {
    if rows.len() <= most {
        return (rows.iter().collect(), String::new());
    }
    let value = |place: &usize| value(&rows[*place]).unwrap_or(0.0);
    let mut places: Vec<usize> = (0..rows.len()).collect();
    places.sort_by(|a, b| value(b).total_cmp(&value(a)));
    places.truncate(most);
    places.sort_unstable();
    let line = wrapped(&format!("{} more layers, with smaller {of} (--all prints them)", rows.len() - most), "");
    (places.into_iter().map(|place| &rows[place]).collect(), line)
}

/// Words at the end of a row are not wrapped to less than this.
const LEAST_WORDS: usize = 24;

/// A number with four significant digits; `-` where there is none.
pub fn short(value: impl Into<Option<f64>>) -> String {
    let Some(value) = value.into() else { return "-".to_owned() };
    let size = value.abs();
    if value == 0.0 || !value.is_finite() {
        format!("{value}")
    } else if !(1e-4..1e6).contains(&size) {
        format!("{value:.3e}")
    } else {
        let digits = (3 - size.log10().floor() as i32).max(0) as usize;
        format!("{value:.digits$}")
    }
}

/// A number with three significant digits at most.
pub fn brief(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 || !value.is_finite() {
        format!("{value}")
    } else if !(1e-2..1e5).contains(&size) {
        format!("{value:.1e}")
    } else {
        let digits = (2 - size.log10().floor() as i32).max(0) as usize;
        format!("{value:.digits$}")
    }
}

/// `min..max`, or one number where both read the same; `-` for nothing.
pub fn range(values: impl Iterator<Item = f64>) -> String {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    if low > high {
        return "-".to_owned();
    }
    let (low, high) = (short(low), short(high));
    if low == high { low } else { format!("{low}..{high}") }
}

/// Text in lines of the width of prose, the first behind `bullet`.
pub fn wrapped(text: &str, bullet: &str) -> String {
    format!("{bullet}{}\n", wrap(text, bullet.chars().count(), terminal::width()))
}

/// Text in lines of at most `width` characters that begin behind `indent`.
fn wrap(text: &str, indent: usize, width: usize) -> String {
    let mut out = String::new();
    let mut line = indent;
    for (place, word) in text.split_whitespace().enumerate() {
        let length = word.chars().count();
        if place > 0 && line + 1 + length > width {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            line = indent;
        } else if place > 0 {
            out.push(' ');
            line += 1;
        }
        out.push_str(word);
        line += length;
    }
    out
}

/// A note, wrapped; a command at its end is copied, and has a line of its own.
pub fn noted(text: &str, bullet: &str) -> String {
    match text.split_once(": vllm serve ") {
        Some((words, rest)) => format!("{}    vllm serve {rest}\n", wrapped(&format!("{words}:"), bullet)),
        None => wrapped(text, bullet),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_wrapped_behind_their_bullet() {
        assert_eq!(wrap("one two three", 2, 9), "one two\n  three");
        assert_eq!(wrapped("one", "- "), "- one\n");
        assert_eq!(wrapped("", "- "), "- \n");
    }

    #[test]
    fn a_command_at_the_end_of_a_note_is_not_wrapped() {
        let long = format!("Keep them: vllm serve {} --kv-cache-dtype fp8", "m".repeat(300));
        let last = noted(&long, "");
        assert!(last.lines().count() == 2 && last.lines().nth(1).unwrap().trim_start().starts_with("vllm serve m"));
    }

    #[test]
    fn numbers_keep_four_digits() {
        let cases =
            [(0.0, "0"), (0.035213846, "0.03521"), (1234.56, "1235"), (9.99996, "10.000"), (2.5e-7, "2.500e-7")];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
        assert_eq!(short(None), "-");
        assert_eq!([0.0, 2.0, 16.04, 448.2, 4.62e-5].map(brief), ["0", "2.00", "16.0", "448", "4.6e-5"]);
        assert_eq!(range([1.0, 2.0].into_iter()), "1.000..2.000");
        assert_eq!(range(std::iter::empty()), "-");
    }

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(["a", "long"]);
        table.row(["1000".to_owned(), "2".to_owned()]);
        assert_eq!(table.within(None), "   a  long\n1000     2\n");
        assert_eq!(table.within(Some(10)), table.within(None));
    }

    #[test]
    fn long_tables_show_the_largest_rows_in_their_order() {
        let rows = [3.0, 9.0, 1.0, 8.0];
        let (shown, line) = largest(&rows, 2, "bounds", |x| Some(*x));
        assert_eq!(
            (shown, line.as_str()),
            (vec![&9.0, &8.0], "2 more layers, with smaller bounds (--all prints them)\n")
        );
        assert_eq!(largest(&rows, 4, "bounds", |x| Some(*x)), (rows.iter().collect(), String::new()));
    }

    #[test]
    fn narrow_tables_are_folded_and_their_words_wrapped() {
        let mut numbers = Table::new(["layer", "first", "second", "third"]);
        numbers.row(["0", "1", "2", "3"].map(str::to_owned));
        let folded = "layer  first\n    0      1\n\nlayer  second\n    0       2\n\nlayer  third\n    0      3\n";
        assert_eq!(numbers.within(Some(13)), folded);
        assert_eq!(numbers.within(Some(20)).split("\n\n").count(), 2);
        let mut words = Table::new(["layer", "why"]).left_last();
        words.row(["3".to_owned(), "a reason that is longer than the line".to_owned()]);
        assert_eq!(words.within(Some(32)), "layer  why\n    3  a reason that is longer\n       than the line\n");
    }
}
