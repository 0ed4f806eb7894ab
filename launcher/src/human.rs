//! Sizes, counts and times as people write and read them.

/// Bytes with an optional binary suffix: `4096`, `64K`, `8MB`, `1.5GiB`.
///
/// # Errors
/// What is wrong, as the end of a sentence.
pub fn parse_bytes(text: &str) -> Result<usize, String> {
    let end = text.find(|c: char| c.is_ascii_alphabetic() && !matches!(c, 'e' | 'E')).unwrap_or(text.len());
    let (digits, suffix) = text.split_at(end);
    let value: f64 = digits
        .trim()
        .parse()
        .map_err(|_| format!("'{text}' is not a number of bytes: give one such as 4096, 64K, 8M or 1G"))?;
    let shift = match suffix.to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        _ => {
            return Err(format!(
                "'{text}' ends in '{suffix}': sizes end in K, M or G, as 1024G does, or in nothing"
            ));
        }
    };
    let bytes = value * (1u64 << shift) as f64;
    match bytes {
        b if b < 0.0 || (b.is_finite() && b.fract() != 0.0) || vanishes(digits, value) => {
            Err(format!("'{text}' is no whole number of bytes: give one such as 4096, 64K, 8M or 1G"))
        }
        b if b < (1u64 << 53) as f64 => Ok(b as usize),
        _ => Err(format!("'{text}' is more than any memory: give less than {}G", 1u64 << 23)),
    }
}

/// Whether `text`, which was read as `value`, is no zero and has become one.
pub fn vanishes(text: &str, value: f64) -> bool {
    let digits = text.split(['e', 'E']).next().unwrap_or_default();
    value == 0.0 && digits.contains(|c: char| matches!(c, '1'..='9'))
}

/// The number of a flag as it was given: 0.9 of f32 is 0.9, where its bits as f64 are 0.8999999761581421.
pub fn as_written(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| x.into())
}

/// `1.5 KiB`, `24.1 MiB`: three digits and a binary unit.
pub fn bytes(n: u64) -> String {
    const NAMES: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut name = 0;
    // 1023.95 would print as 1024.
    while value >= 1023.95 && name + 1 < NAMES.len() {
        value /= 1024.0;
        name += 1;
    }
    match name {
        0 => format!("{n} B"),
        _ if value < 9.995 => format!("{value:.2} {}", NAMES[name]),
        _ => format!("{value:.1} {}", NAMES[name]),
    }
}

/// `857k`, `31.6M`, `8.03G`: three digits and a decimal suffix; below 10000 a whole number.
pub fn count(n: f64) -> String {
    let (value, suffix) = match n.abs() {
        a if a >= 999.5e9 => (n / 1e12, "T"),
        a if a >= 999.5e6 => (n / 1e9, "G"),
        a if a >= 999.5e3 => (n / 1e6, "M"),
        a if a >= 9.995e3 => (n / 1e3, "k"),
        _ => return format!("{n:.0}"),
    };
    format!("{}{suffix}", three_digits(value))
}

/// As [`count`], of what is no count and may be small: `0.56`, `12.3`.
pub fn rate(n: f64) -> String {
    match n.abs() {
        // Two decimals would be one digit, or none.
        a if a > 0.0 && a < 0.0995 => format!("{n:.1e}"),
        a if a < 999.5 => three_digits(n),
        _ => count(n),
    }
}

fn three_digits(value: f64) -> String {
    match value.abs() {
        a if a >= 99.95 => format!("{value:.0}"),
        a if a >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// `2.346`, `12.35`, `123.5`, `1.2e-5`: what may be of any size, in about as many characters.
pub fn figure(x: f64) -> String {
    match x.abs() {
        a if a >= 99999.5 || (a > 0.0 && a < 0.00995) => format!("{x:.1e}"),
        a if a >= 999.95 => format!("{x:.0}"),
        a if a >= 99.995 => format!("{x:.1}"),
        a if a >= 9.9995 => format!("{x:.2}"),
        _ => format!("{x:.3}"),
    }
}

/// `20 us`, `1.5 ms`, `850 ms`, `12.3 s`, `4 min 10 s`, `26 h 5 min`.
pub fn seconds(s: f64) -> String {
    // Two or three digits of a unit of which there are less than a thousand.
    let of = |value: f64, unit: &str| match value {
        v if v < 9.95 => format!("{v:.1} {unit}"),
        v => format!("{v:.0} {unit}"),
    };
    match s {
        s if s <= 0.0 => "0 s".to_owned(),
        s if s < 0.9995e-6 => of(s * 1e9, "ns"),
        s if s < 0.9995e-3 => of(s * 1e6, "us"),
        s if s < 0.9995 => of(s * 1e3, "ms"),
        s if s < 99.95 => format!("{s:.1} s"),
        s if s < 3599.5 => format!("{:.0} min {:.0} s", (s.round() / 60.0).floor(), s.round() % 60.0),
        s => {
            let minutes = (s / 60.0).round();
            format!("{:.0} h {:.0} min", (minutes / 60.0).floor(), minutes % 60.0)
        }
    }
}

/// `1 rank`, `2 ranks`, `2 batches`.
pub fn several(n: usize, what: &str) -> String {
    let ending = match what.ends_with("ch") {
        _ if n == 1 => "",
        true => "es",
        false => "s",
    };
    format!("{n} {what}{ending}")
}

/// What was typed as a flag's value, so that nothing is to be seen, too.
pub fn quoted(text: &str) -> String {
    match text.is_empty() || text.contains(char::is_whitespace) {
        true => format!("'{text}'"),
        false => text.to_owned(),
    }
}

/// A word of a command line as a shell takes it for one.
pub fn typed(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// `--model, --micro-batch or --seq`: those words that are to be named.
pub fn either<'a>(words: impl IntoIterator<Item = (&'a str, bool)>) -> String {
    let words: Vec<&str> = words.into_iter().filter(|(_, named)| *named).map(|(word, _)| word).collect();
    match words.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, before)) => format!("{} or {last}", before.join(", ")),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_binary_suffixes_and_nothing_else() {
        let good = [
            ("4096", 4096),
            ("64K", 65536),
            ("8M", 8 << 20),
            ("1.5G", 3 << 29),
            ("2mb", 2 << 20),
            ("1KiB", 1024),
            ("3MiB", 3 << 20),
            ("1gib", 1 << 30),
            ("64B", 64),
            ("1e6", 1_000_000),
            ("0", 0),
        ];
        for (text, value) in good {
            assert_eq!(parse_bytes(text), Ok(value), "{text}");
        }
        for (texts, words) in [
            (&["", "M", "eight", "nan", "é", "Ké", "-", "1.2.3K"][..], "is not a number of bytes"),
            (&["-1", "-1K", "0.3", "1e-400"], "is no whole number of bytes"),
            (&["8T", "64X", "1KBB", "1KiBs", "2 Mbit"], "sizes end in K, M or G"),
            (&["1e30", "8388608G", "99999999999999999999"], "is more than any memory"),
        ] {
            for text in texts {
                let e = parse_bytes(text).unwrap_err();
                assert!(e.contains(&format!("'{text}'")) && e.contains(words), "{text}: {e}");
            }
        }
    }

    #[test]
    fn only_what_is_to_be_named_is() {
        let text = |named: [bool; 3]| either(["-e", "-m", "--ranks"].into_iter().zip(named));
        assert_eq!(text([true; 3]), "-e, -m or --ranks");
        assert_eq!(text([true, false, true]), "-e or --ranks");
        assert_eq!(text([false, true, false]), "-m");
    }

    #[test]
    fn readable_forms_keep_three_digits() {
        assert_eq!(
            [0, 1023, 1024, 1 << 20, 25_300_000, 1 << 40].map(bytes),
            ["0 B", "1023 B", "1.00 KiB", "1.00 MiB", "24.1 MiB", "1.00 TiB"]
        );
        let counts = [7.0, 9994.0, 857_216.0, 31_597_056.0, 8.03e9, 999.4e9, 999.6e9].map(count);
        assert_eq!(counts, ["7", "9994", "857k", "31.6M", "8.03G", "999G", "1.00T"]);
        let rates = [0.0, 0.0012, 0.56, 9.996, 12.34, 999.4, 999.6, 41234.0].map(rate);
        assert_eq!(rates, ["0.00", "1.2e-3", "0.56", "10.0", "12.3", "999", "1000", "41.2k"]);
        assert_eq!([2e-5, 0.25, 12.34, 250.0].map(seconds), ["20 us", "250 ms", "12.3 s", "4 min 10 s"]);
        assert_eq!(
            [0.0, 3.2e-10, 3.2e-7, 1.26e-6, 1.5e-3].map(seconds),
            ["0 s", "0.3 ns", "320 ns", "1.3 us", "1.5 ms"]
        );
        // Rounded up to the next unit's, in that.
        assert_eq!([9.996e-7, 9.996e-4, 0.9996].map(seconds), ["1.0 us", "1.0 ms", "1.0 s"]);
        assert_eq!([9.994e-7, 9.994e-4, 0.9994].map(seconds), ["999 ns", "999 us", "999 ms"]);
        assert_eq!([3599.4, 3599.6, 93900.0].map(seconds), ["59 min 59 s", "1 h 0 min", "26 h 5 min"]);
    }

    #[test]
    fn figures_of_any_size_take_about_as_much_room() {
        let figures = [0.0, 0.5, 2.3456, 11.2345, 512.34, 9999.6, 123_456.0, 3e38, 0.000_012].map(figure);
        assert_eq!(
            figures,
            ["0.000", "0.500", "2.346", "11.23", "512.3", "10000", "1.2e5", "3.0e38", "1.2e-5"]
        );
        assert_eq!([f64::NAN, f64::INFINITY].map(figure), ["NaN", "inf"]);
    }

    #[test]
    fn one_is_no_plural_and_nothing_can_be_seen() {
        assert_eq!([0, 1, 2].map(|n| several(n, "rank")), ["0 ranks", "1 rank", "2 ranks"]);
        assert_eq!([1, 2].map(|n| several(n, "batch")), ["1 batch", "2 batches"]);
        assert_eq!(["", "1 us", "1us"].map(quoted), ["''", "'1 us'", "1us"]);
    }
}
