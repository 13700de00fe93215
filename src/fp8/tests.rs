use super::*;
use proptest::prelude::*;

const BOTH: [OnOverflow; 2] = [OnOverflow::Saturate, OnOverflow::NonFinite];

/// The value of a code from the definition, in f64.
fn by_definition(format: Format, code: u8) -> f64 {
    let (mantissa, bias) = match format {
        Format::E5m2 => (2, 15),
        _ => (3, 7),
    };
    let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
    let magnitude = i32::from(code & 0x7f);
    let (e, m) = (magnitude >> mantissa, f64::from(magnitude & ((1 << mantissa) - 1)) / f64::from(1 << mantissa));
    let special = match format {
        Format::E4m3 => magnitude == 0x7f,
        Format::E5m2 => e == 31,
        Format::E4m3Ieee => e == 15,
    };
    match (special, e) {
        (true, _) if format != Format::E4m3 && m == 0.0 => sign * f64::INFINITY,
        (true, _) => f64::NAN,
        (false, 0) => sign * 2f64.powi(1 - bias) * m,
        (false, e) => sign * 2f64.powi(e - bias) * (1.0 + m),
    }
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Non-negative finite values in order, with their codes.
fn grid(format: Format) -> Vec<(u8, f32)> {
    let mut all = Vec::new();
    for code in 0..128u8 {
        let value = by_definition(format, code);
        if value.is_finite() {
            all.push((code, value as f32));
        }
    }
    all
}

#[test]
fn every_code_decodes_by_definition_and_comes_back() {
    for format in Format::ALL {
        for code in 0..=255u8 {
            let value = format.decode(code);
            assert!(same(value, by_definition(format, code) as f32), "{format:?} {code:#x} {value}");
            for on_overflow in BOTH {
                if value.is_finite() {
                    assert_eq!(format.encode(value, on_overflow), code, "{format:?} {code:#x}");
                    assert_eq!(format.encode_stochastic(value, u32::MAX, on_overflow), code, "{format:?} {code:#x}");
                    assert!(same(format.round(value, on_overflow), value));
                } else if value.is_nan() {
                    assert!(format.decode(format.encode(value, on_overflow)).is_nan());
                }
            }
        }
    }
}

#[test]
fn limits_are_the_formats_own() {
    let limits = |f: Format| (f.max(), f.min_normal(), f.min_subnormal());
    assert_eq!(limits(Format::E4m3), (448.0, 2f32.powi(-6), 2f32.powi(-9)));
    assert_eq!(limits(Format::E5m2), (57344.0, 2f32.powi(-14), 2f32.powi(-16)));
    assert_eq!(limits(Format::E4m3Ieee), (240.0, 2f32.powi(-6), 2f32.powi(-9)));
    for format in Format::ALL {
        assert_eq!(format.max(), grid(format).last().unwrap().1);
        let last = format.last_rounding();
        assert_eq!(format.round(last, OnOverflow::NonFinite), format.max());
        assert!(!format.round(last.next_up(), OnOverflow::NonFinite).is_finite());
        assert_eq!(format.round(last.next_up(), OnOverflow::Saturate), format.max());
    }
}

#[test]
fn midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearest() {
    for format in Format::ALL {
        for pair in grid(format).windows(2) {
            let ((low, a), (high, b)) = (pair[0], pair[1]);
            let middle = ((f64::from(a) + f64::from(b)) / 2.0) as f32;
            let even = if low % 2 == 0 { low } else { high };
            for (x, code) in [(middle, even), (middle.next_down(), low), (middle.next_up(), high)] {
                for on_overflow in BOTH {
                    assert_eq!(format.encode(x, on_overflow), code, "{format:?} {x}");
                    assert_eq!(format.encode(-x, on_overflow), code | 0x80, "{format:?} -{x}");
                    assert!(same(format.round(x, on_overflow), format.decode(code)), "{format:?} {x}");
                    assert!(same(format.round(-x, on_overflow), format.decode(code | 0x80)), "{format:?} -{x}");
                }
            }
        }
    }
}

#[test]
fn beyond_the_range_is_the_maximum_or_not_a_finite_number() {
    for format in Format::ALL {
        for x in [format.last_rounding().next_up(), 1e6, 3e38, f32::INFINITY] {
            assert_eq!(format.round(x, OnOverflow::Saturate), format.max());
            assert_eq!(format.round(-x, OnOverflow::Saturate), -format.max());
            let open = format.decode(format.encode(-x, OnOverflow::NonFinite));
            match format {
                Format::E4m3 => assert!(open.is_nan()),
                _ => assert_eq!(open, f32::NEG_INFINITY),
            }
        }
        for on_overflow in BOTH {
            assert!(format.round(f32::NAN, on_overflow).is_nan());
            assert!(format.decode(format.encode(-f32::NAN, on_overflow)).is_nan());
        }
    }
}

/// The float8 crate always saturates. Its NaN code for E5M2 carries mantissa bits of the input (`0x7e | m`), ours is
/// always `0x7e`; its `F8E4M3::MAX` is 416 and its `F8E4M3::INFINITY` the value 448, so neither constant is used here.
#[test]
fn saturating_casts_agree_with_float8() {
    assert_eq!(float8::F8E4M3::MAX.to_f32(), 416.0);
    assert_eq!(float8::F8E4M3::INFINITY.to_f32(), 448.0);
    let mut bits = 0u32;
    loop {
        let x = f32::from_bits(bits);
        if !x.is_nan() {
            assert_eq!(Format::E4m3.encode(x, OnOverflow::Saturate), float8::F8E4M3::from_f32(x).to_bits(), "{x:e}");
            assert_eq!(Format::E5m2.encode(x, OnOverflow::Saturate), float8::F8E5M2::from_f32(x).to_bits(), "{x:e}");
        }
        // A prime step meets every binade at unrelated places.
        match bits.checked_add(2053) {
            Some(next) => bits = next,
            None => break,
        }
    }
}

#[test]
fn open_casts_agree_with_ml_dtypes() {
    let mut rows = 0;
    for line in include_str!("../../tests/data/fp8_ml_dtypes.csv").lines().filter(|l| !l.starts_with('#')) {
        let mut fields = line.split(',').map(|f| u32::from_str_radix(f, 16).unwrap());
        let x = f32::from_bits(fields.next().unwrap());
        for format in Format::ALL {
            let code = fields.next().unwrap() as u8;
            assert_eq!(format.encode(x, OnOverflow::NonFinite), code, "{format:?} {x:e}");
            assert!(same(format.round(x, OnOverflow::NonFinite), format.decode(code)), "{format:?} {x:e}");
        }
        rows += 1;
    }
    assert!(rows > 4000, "{rows}");
}

#[test]
fn stochastic_rounding_is_unbiased() {
    // The upper code is taken for exactly the share of random words that the position asks for.
    for format in Format::ALL {
        for pair in grid(format).windows(2) {
            let ((low, a), (high, b)) = (pair[0], pair[1]);
            for share in [0.25f64, 0.5, 0.8125] {
                let x = (f64::from(a) + share * (f64::from(b) - f64::from(a))) as f32;
                let first_up = ((1.0 - share) * 2f64.powi(32)) as u32;
                for (random, code) in [(0, low), (first_up - 1, low), (first_up, high), (u32::MAX, high)] {
                    assert_eq!(format.encode_stochastic(x, random, OnOverflow::Saturate), code, "{format:?} {x}");
                }
            }
        }
    }
    let e4m3 = |x: f32, random| Format::E4m3.encode_stochastic(x, random, OnOverflow::NonFinite);
    assert_eq!((e4m3(456.0, 0), e4m3(456.0, u32::MAX)), (0x7e, 0x7f));
    assert_eq!((e4m3(1e-45, u32::MAX), e4m3(1e-6, u32::MAX), e4m3(-0.0, u32::MAX)), (0, 1, 0x80));
    assert_eq!((e4m3(f32::NAN, 7), e4m3(f32::INFINITY, 7)), (0x7f, 0x7f));
}

#[test]
fn slices_count_what_leaves_the_range() {
    let x = [0.0, 1.0, -448.0, 448.0f32.next_up(), -464.0, 464.0f32.next_up(), 1e30, f32::INFINITY, f32::NEG_INFINITY];
    let mut codes = [0u8; 9];
    let counts = Format::E4m3.encode_slice(&x, 1.0, OnOverflow::NonFinite, &mut codes).unwrap();
    let want = Counts { amax: f32::INFINITY, overflow: 4, beyond_rounding: 2, non_finite: 2, count: 9 };
    assert_eq!(counts, want);
    assert_eq!(codes, [0, 0x38, 0xfe, 0x7e, 0xfe, 0x7f, 0x7f, 0x7f, 0xff]);
    assert_eq!(Format::E4m3.count_slice(&x, 1.0).unwrap(), want);
    // A finite value that scaling takes to infinity is an overflow, not a non-finite input.
    let counts = Format::E4m3.count_slice(&[1e30, f32::NAN, 2.0], 1e30).unwrap();
    assert!(counts.amax.is_nan());
    assert_eq!((counts.overflow, counts.beyond_rounding, counts.non_finite, counts.count), (2, 2, 1, 3));
    let e5m2 = Format::E5m2.count_slice(&[57344.0, 60000.0, 61440.0], 1.0).unwrap();
    assert_eq!((e5m2.overflow, e5m2.beyond_rounding), (2, 1));
}

/// Long slices are shared among threads; 300007 values leave a short last part.
#[test]
fn long_slices_are_converted_whole() {
    let x: Vec<f32> = (0..300_007u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 * 6e-5 - 500.0).collect();
    let (mut codes, mut values) = (vec![0; x.len()], vec![0.0; x.len()]);
    let counts = Format::E4m3.encode_slice(&x, 1.0, OnOverflow::Saturate, &mut codes).unwrap();
    assert_eq!(counts, Format::E4m3.count_slice(&x, 1.0).unwrap());
    assert_eq!(counts, Format::E4m3.round_slice(&x, 1.0, OnOverflow::Saturate, &mut values).unwrap());
    assert_eq!(counts.overflow, x.iter().filter(|x| x.abs() > 448.0).count() as u64);
    assert!(counts.overflow > counts.beyond_rounding && counts.beyond_rounding > 0 && counts.count == 300_007);
    for ((x, code), value) in x.iter().zip(&codes).zip(&values) {
        assert_eq!(*code, Format::E4m3.encode(*x, OnOverflow::Saturate));
        assert_eq!(*value, Format::E4m3.decode(*code));
    }
}

#[test]
fn slices_refuse_other_lengths_and_bad_multipliers() {
    let mut out = [0u8; 2];
    assert!(Format::E4m3.encode_slice(&[1.0], 1.0, OnOverflow::Saturate, &mut out).unwrap_err().is_argument());
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(Format::E4m3.encode_slice(&[1.0; 2], bad, OnOverflow::Saturate, &mut out).is_err());
        assert!(Format::E4m3.count_slice(&[1.0], bad).is_err());
    }
}

proptest! {
    #[test]
    fn slices_do_what_scalars_do(
        x in prop::collection::vec(any::<f32>(), 0..200),
        small in prop::collection::vec(-1000f32..1000.0, 0..200),
        exponent in -20i32..20,
    ) {
        let x: Vec<f32> = x.into_iter().chain(small).collect();
        let multiplier = 2f32.powi(exponent) * 1.1;
        for format in Format::ALL {
            for on_overflow in BOTH {
                let (mut codes, mut values) = (vec![0; x.len()], vec![0.0; x.len()]);
                let counts = format.encode_slice(&x, multiplier, on_overflow, &mut codes).unwrap();
                let again = format.round_slice(&x, multiplier, on_overflow, &mut values).unwrap();
                prop_assert!(same(counts.amax, again.amax) && counts.overflow == again.overflow);
                for i in 0..x.len() {
                    prop_assert_eq!(codes[i], format.encode(x[i] * multiplier, on_overflow));
                    prop_assert!(same(values[i], format.decode(codes[i])));
                }
            }
            let finite = x.iter().filter(|x| x.is_finite());
            let over = finite.clone().filter(|&&x| (x * multiplier).abs() > format.max()).count() as u64;
            let counts = format.count_slice(&x, multiplier).unwrap();
            prop_assert_eq!(counts.overflow, over);
            prop_assert_eq!(counts.non_finite, (x.len() - finite.count()) as u64);
        }
    }

    #[test]
    fn a_covering_descale_with_its_margin_never_overflows(amax in 1e-30f32..1e30) {
        let descale = (f64::from(amax) * (1.0 + 2f64.powi(-22)) / 448.0) as f32;
        prop_assume!(f64::from(descale) * 448.0 >= f64::from(amax) * (1.0 + 2f64.powi(-22)));
        prop_assert_eq!(Format::E4m3.count_slice(&[amax], 1.0 / descale).unwrap().overflow, 0);
    }
}

#[test]
fn slices_within_the_range_are_cast_as_single_values_are() {
    for format in Format::ALL {
        let max = format.max().to_bits();
        // A prime step meets every binade at unrelated places; grid points, midpoints and their neighbors come on top.
        let mut x: Vec<f32> = (0..=max).step_by(1021).map(f32::from_bits).collect();
        for pair in grid(format).windows(2) {
            let middle = (pair[0].1 + pair[1].1) / 2.0;
            x.extend([pair[1].1, pair[1].1.next_down(), middle, middle.next_down(), middle.next_up()]);
        }
        x.extend(x.clone().iter().map(|x| -x));
        for multiplier in [1.0, 0.37, 2f32.powi(-60)] {
            let (mut codes, mut values) = (vec![0; x.len()], vec![0.0; x.len()]);
            let counts = format.encode_slice(&x, multiplier, OnOverflow::Saturate, &mut codes).unwrap();
            format.round_slice(&x, multiplier, OnOverflow::NonFinite, &mut values).unwrap();
            assert_eq!((counts.amax, counts.overflow, counts.count), (format.max(), 0, x.len() as u64));
            for ((x, code), value) in x.iter().zip(&codes).zip(&values) {
                let y = x * multiplier;
                assert_eq!(*code, format.encode(y, OnOverflow::Saturate), "{format:?} {y:e}");
                assert!(same(*value, format.round(y, OnOverflow::NonFinite)), "{format:?} {y:e}");
            }
        }
    }
}

#[test]
fn a_slice_that_barely_leaves_the_range_is_counted() {
    for format in Format::ALL {
        let (max, last) = (format.max(), format.last_rounding());
        // Scales of both kinds: what counts is the product.
        for multiplier in [1.0, 2f32.powi(-20), 2f32.powi(20)] {
            for (y, overflow, beyond) in [(max, 0, 0), (max.next_up(), 2, 0), (last, 2, 0), (last.next_up(), 2, 2)] {
                let x = [0.25 / multiplier, y / multiplier, -y / multiplier];
                let (mut codes, mut values) = ([0; 3], [0.0; 3]);
                let counts = [
                    format.encode_slice(&x, multiplier, OnOverflow::NonFinite, &mut codes).unwrap(),
                    format.round_slice(&x, multiplier, OnOverflow::NonFinite, &mut values).unwrap(),
                    format.count_slice(&x, multiplier).unwrap(),
                ];
                for counts in counts {
                    let have = (counts.overflow, counts.beyond_rounding, counts.non_finite, counts.amax);
                    assert_eq!(have, (overflow, beyond, 0, y / multiplier), "{format:?} {y} by {multiplier}");
                }
                assert_eq!(codes[1], format.encode(y, OnOverflow::NonFinite));
                assert!(same(values[2], format.round(-y, OnOverflow::NonFinite)));
            }
        }
    }
}
