//! Sizes, counts and times as people write and read them.

/// Bytes with an optional binary suffix: `4096`, `64K`, `8M`, `1.5G`.
///
/// # Errors
/// What is wrong, as the end of a sentence.
pub fn parse_bytes(text: &str) -> Result<usize, String> {
    let wrong = || format!("'{text}' is not a number of bytes: give one such as 4096, 64K, 8M or 1G");
    let (digits, shift) = match text.trim_end_matches(['B', 'b']) {
        t if t.ends_with(['K', 'k']) => (&t[..t.len() - 1], 10),
        t if t.ends_with(['M', 'm']) => (&t[..t.len() - 1], 20),
        t if t.ends_with(['G', 'g']) => (&t[..t.len() - 1], 30),
        t => (t, 0),
    };
    let value: f64 = digits.trim().parse().map_err(|_| wrong())?;
    let bytes = value * (1u64 << shift) as f64;
    if !(bytes.is_finite() && bytes >= 0.0 && bytes < (1u64 << 53) as f64 && bytes.fract() == 0.0) {
        return Err(wrong());
    }
    Ok(bytes as usize)
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

/// `857 k`, `31.6 M`, `8.03 G`: three digits and a decimal suffix.
pub fn count(n: f64) -> String {
    let (value, suffix) = match n.abs() {
        a if a >= 999.5e6 => (n / 1e9, "G"),
        a if a >= 999.5e3 => (n / 1e6, "M"),
        a if a >= 9.995e3 => (n / 1e3, "k"),
        _ => return format!("{n:.0}"),
    };
    match value.abs() {
        a if a >= 99.95 => format!("{value:.0}{suffix}"),
        a if a >= 9.995 => format!("{value:.1}{suffix}"),
        _ => format!("{value:.2}{suffix}"),
    }
}

/// `850 ms`, `12.3 s`, `4 min 10 s`.
pub fn seconds(s: f64) -> String {
    match s {
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 0.9995 => format!("{:.0} ms", s * 1e3),
        s if s < 99.95 => format!("{s:.1} s"),
        s => format!("{:.0} min {:.0} s", (s.round() / 60.0).floor(), s.round() % 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_binary_suffixes_and_nothing_else() {
        let good =
            [("4096", 4096), ("64K", 65536), ("8M", 8 << 20), ("1.5G", 3 << 29), ("2mb", 2 << 20), ("0", 0)];
        for (text, value) in good {
            assert_eq!(parse_bytes(text), Ok(value), "{text}");
        }
        for text in ["", "M", "-1", "1T", "eight", "1e30", "nan", "0.3", "é", "Ké"] {
            assert!(parse_bytes(text).unwrap_err().contains(&format!("'{text}'")), "{text}");
        }
    }

    #[test]
    fn readable_forms_keep_three_digits() {
        assert_eq!(
            [0, 1023, 1024, 1 << 20, 25_300_000, 1 << 40].map(bytes),
            ["0 B", "1023 B", "1.00 KiB", "1.00 MiB", "24.1 MiB", "1.00 TiB"]
        );
        let counts = [7.0, 9994.0, 857_216.0, 31_597_056.0, 8.03e9].map(count);
        assert_eq!(counts, ["7", "9994", "857k", "31.6M", "8.03G"]);
        assert_eq!([2e-5, 0.25, 12.34, 250.0].map(seconds), ["20 us", "250 ms", "12.3 s", "4 min 10 s"]);
    }
}
