//! Numbers of the command line. Each is one word, so that `--steps -3` is a wrong value and not a wrong option.

use std::num::{IntErrorKind, ParseIntError};

/// A whole number from 1 on.
pub fn count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(count @ 1..) => Ok(count),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Err(format!("expected at most {}", usize::MAX)),
        _ => Err("expected an integer of at least 1".to_owned()),
    }
}

/// A whole number from 0 on.
pub fn whole(text: &str) -> Result<u64, String> {
    text.parse().map_err(|error: ParseIntError| match error.kind() {
        IntErrorKind::PosOverflow => format!("expected at most {}", u64::MAX),
        _ => "expected an integer of at least 0".to_owned(),
    })
}

/// A finite number; its range is the option's own rule.
pub fn real(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x: &f64| x.is_finite()).ok_or_else(|| "expected a finite number".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_their_range_are_refused() {
        for bad in ["-3", "0", "1.5", "", "x"] {
            assert!(count(bad).unwrap_err().contains("at least 1"), "{bad}");
        }
        assert!(count("99999999999999999999999").unwrap_err().contains("at most 18446744073709551615"));
        assert!(whole("99999999999999999999999").unwrap_err().contains("at most"));
        assert_eq!((count("7"), whole("0")), (Ok(7), Ok(0)));
        assert!(whole("-1").is_err() && real("nan").is_err() && real("inf").is_err());
        assert_eq!(real("-1e-6"), Ok(-1e-6));
    }
}
