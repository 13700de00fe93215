//! Aligned text tables, wrapped text and short numbers.

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

    /// The text, a line per row.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| self.rows.iter().filter_map(|row| row.get(c)).map(|cell| cell.chars().count()).max();
        let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
        let line = |row: &Vec<String>| {
            let cell = |(place, (cell, &width)): (usize, (&String, &usize))| match self.left && place == 0 {
                true => format!("{cell:<width$}"),
                false if self.left_last && place + 1 == columns => cell.clone(),
                false => format!("{cell:>width$}"),
            };
            row.iter().zip(&widths).enumerate().map(cell).collect::<Vec<_>>().join("  ")
        };
        self.rows.iter().map(|row| line(row) + "\n").collect()
    }
}

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

/// Text in lines of at most `width` characters, the first behind `bullet`.
pub fn wrapped(text: &str, bullet: &str, width: usize) -> String {
    let mut out = String::from(bullet);
    let mut line = bullet.len();
    for (place, word) in text.split_whitespace().enumerate() {
        let length = word.chars().count();
        if place > 0 && line + 1 + length > width {
            out.push('\n');
            out.push_str(&" ".repeat(bullet.len()));
            line = bullet.len();
        } else if place > 0 {
            out.push(' ');
            line += 1;
        }
        out.push_str(word);
        line += length;
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_wrapped_behind_their_bullet() {
        assert_eq!(wrapped("one two three", "- ", 9), "- one two\n  three\n");
        assert_eq!(wrapped("", "- ", 9), "- \n");
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
        assert_eq!(table.render(), "   a  long\n1000     2\n");
    }
}
