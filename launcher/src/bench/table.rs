//! The table of nccl-tests, to the column, so that scripts which parse theirs parse ours.

use super::statistics::Summary;
use collectives::{DType, ReduceOp};

/// One half of a row: out of place or in place.
#[derive(Clone, Debug)]
pub struct Half {
    /// Seconds of one call.
    pub seconds: f64,
    /// Decimal GB/s.
    pub algorithm_bandwidth: f64,
    /// Decimal GB/s.
    pub bus_bandwidth: f64,
    /// Wrong elements over all ranks; None where results were not checked.
    pub wrong: Option<u64>,
    /// Over single calls on the slowest rank of each, in seconds; None where that is not asked for.
    pub per_call: Option<Summary>,
}

/// What the columns of a row's left side say.
#[derive(Clone, Debug)]
pub struct Label {
    pub bytes: usize,
    pub count: usize,
    pub dtype: &'static str,
    pub op: &'static str,
    /// -1 where no rank is special.
    pub root: i64,
}

/// Which optional columns there are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Columns {
    /// `i_min i_max i_p99 i_cv%` in each half (nccl-tests' `-I 1`).
    pub per_call: bool,
    /// When each row was printed (`-S 1`).
    pub timestamps: bool,
}

/// The name of a type in nccl-tests' output.
pub fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::I8 => "int8",
        DType::U8 => "uint8",
        DType::I32 => "int32",
        DType::U32 => "uint32",
        DType::I64 => "int64",
        DType::U64 => "uint64",
        DType::F16 => "half",
        DType::F32 => "float",
        DType::F64 => "double",
        DType::Bf16 => "bfloat16",
    }
}

/// The name of a reduction in nccl-tests' output; `none` where nothing is reduced.
pub fn op_name(op: Option<ReduceOp>) -> &'static str {
    op.map_or("none", ReduceOp::name)
}

const STAMP: &str = "%Y-%m-%d %H:%M:%S";

impl Columns {
    /// The lines above the rows.
    pub fn header(self) -> String {
        let names = ["time", "algbw", "busbw", "#wrong"];
        let units = ["(us)", "(GB/s)", "(GB/s)", ""];
        let halves = |head: &[&str; 4], more: [&str; 4]| {
            let mut half = format!("  {:>7}  {:>6}  {:>6}  {:>6}", head[0], head[1], head[2], head[3]);
            if self.per_call {
                for name in more {
                    half += &format!("  {name:>7}");
                }
            }
            half.clone() + &half
        };
        let titles = match self.per_call {
            true => {
                "              out-of-place (+ per-iteration)                                in-place (+ per-iteration)"
            }
            false => "           out-of-place                       in-place          ",
        };
        let left = |names: [&str; 5]| {
            format!("# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}", names[0], names[1], names[2], names[3], names[4])
        };
        let stamp = |text: &str| if self.timestamps { format!(" {text:>19}") } else { " ".into() };
        format!(
            "#\n{}{titles}\n{}{}{}\n{}{}{}\n",
            left([""; 5]),
            left(["size", "count", "type", "redop", "root"]),
            halves(&names, ["i_min", "i_max", "i_p99", "i_cv%"]),
            stamp("timestamp"),
            left(["(B)", "(elements)", "", "", ""]),
            halves(&units, ["(us)", "(us)", "(us)", "(%)"]),
            stamp(STAMP),
        )
    }

    /// One half of a row.
    pub fn half(self, half: &Half) -> String {
        let wrong = match half.wrong {
            Some(n) => format!("{:>6}", general(n)),
            // One less, as in nccl-tests.
            None => "  N/A".into(),
        };
        let mut text = format!(
            "  {}  {}  {}  {wrong}",
            number(half.seconds * 1e6, 7),
            number(half.algorithm_bandwidth, 6),
            number(half.bus_bandwidth, 6)
        );
        if let Some(s) = &half.per_call {
            for value in [s.min * 1e6, s.max * 1e6, s.p99 * 1e6, s.variation_percent()] {
                text += "  ";
                text += &number(value, 7);
            }
        }
        text
    }

    /// What follows both halves.
    pub fn end(self, now: &str) -> String {
        if self.timestamps { format!("{now:>21}\n") } else { "\n".into() }
    }
}

impl Label {
    /// The left side of a row.
    pub fn text(&self) -> String {
        format!("{:>12}  {:>12}  {:>8}  {:>6}  {:>6}", self.bytes, self.count, self.dtype, self.op, self.root)
    }
}

/// The two lines that every parser looks for. `passed` is the verdict of a bandwidth gate, if there is one.
pub fn footer(failures: u64, average_bus_bandwidth: f64, passed: Option<bool>) -> String {
    let verdict = if failures == 0 { "OK" } else { "FAILED" };
    let gate = match passed {
        None => "",
        Some(true) => "OK",
        Some(false) => "FAILED",
    };
    let average = significant(average_bus_bandwidth);
    format!(
        "# {:<20} : {failures} {verdict}\n# {:<20} : {average} {gate}\n#\n",
        "Out of bounds values", "Avg bus bandwidth"
    )
}

/// A positive number in exactly `width` columns where that can be done: two digits after the point, else one,
/// else none, else an exponent.
fn number(value: f64, width: usize) -> String {
    for digits in [2, 1, 0] {
        let text = format!("{value:>width$.digits$}");
        if text.len() <= width {
            return text;
        }
    }
    format!("{:>width$}", exponent(value, if width >= 7 { 1 } else { 0 }))
}

/// C's `%.{digits}e`.
fn exponent(value: f64, digits: usize) -> String {
    let text = format!("{value:.digits$e}");
    let (mantissa, power) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, power) = match power.strip_prefix('-') {
        Some(rest) => ('-', rest),
        None => ('+', power),
    };
    format!("{mantissa}e{sign}{power:0>2}")
}

/// C's `%g` of a count.
fn general(count: u64) -> String {
    if count < 1_000_000 { count.to_string() } else { significant(count as f64) }
}

/// C's `%g`: as few of six digits as say it.
pub fn significant(value: f64) -> String {
    const DIGITS: usize = 6;
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    let scientific = exponent(value, DIGITS - 1);
    let power: i32 = scientific.rsplit_once('e').and_then(|(_, p)| p.parse().ok()).unwrap_or(0);
    let trim = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if power < -4 || power >= DIGITS as i32 {
        let (mantissa, rest) = scientific.split_at(scientific.find('e').unwrap_or(scientific.len()));
        return trim(mantissa) + rest;
    }
    trim(&format!("{value:.*}", (DIGITS as i32 - 1 - power).max(0) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fill_their_columns_as_printf_does() {
        for (value, width, text) in [
            (0.0, 7, "   0.00"),
            (1.234, 7, "   1.23"),
            (9999.99, 7, "9999.99"),
            (12345.67, 7, "12345.7"),
            (1234567.8, 7, "1234568"),
            (123456789.0, 7, "1.2e+08"),
            (999.99, 6, "999.99"),
            (1000.55, 6, "1000.5"),
            (1234567.0, 6, " 1e+06"),
        ] {
            assert_eq!(number(value, width), text, "{value}");
        }
    }

    #[test]
    fn general_numbers_are_those_of_printf() {
        for (value, text) in [
            (0.0, "0"),
            (5.5, "5.5"),
            (12.3456789, "12.3457"),
            (100000.0, "100000"),
            (5e-4, "0.0005"),
            (0.1 + 0.2, "0.3"),
            (2.5, "2.5"),
            (64.0, "64"),
            (1000.0, "1000"),
            (1234567.0, "1.23457e+06"),
            (0.0001234, "0.0001234"),
            (0.00001234, "1.234e-05"),
            (999999.5, "1e+06"),
        ] {
            assert_eq!(significant(value), text, "{value}");
        }
        assert_eq!([0, 7, 999_999, 1_000_000].map(general), ["0", "7", "999999", "1e+06"]);
    }

    fn half(wrong: Option<u64>) -> Half {
        Half { seconds: 2e-6, algorithm_bandwidth: 0.51, bus_bandwidth: 0.26, wrong, per_call: None }
    }

    #[test]
    fn a_table_is_that_of_nccl_tests_to_the_column() {
        let columns = Columns::default();
        let label = Label { bytes: 1024, count: 256, dtype: "float", op: "sum", root: -1 };
        let unchecked =
            label.text() + &columns.half(&half(None)) + &columns.half(&half(None)) + &columns.end("");
        let row =
            label.text() + &columns.half(&half(Some(0))) + &columns.half(&half(Some(7))) + &columns.end("");
        let shown = columns.header() + &unchecked + &row + &footer(0, 12.345678, None);
        let expected = "\
#
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong 
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         
        1024           256     float     sum      -1     2.00    0.51    0.26    N/A     2.00    0.51    0.26    N/A
        1024           256     float     sum      -1     2.00    0.51    0.26       0     2.00    0.51    0.26       7
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 12.3457 
#
";
        assert_eq!(shown, expected);
        assert!(footer(3, 1.0, Some(false)).starts_with("# Out of bounds values : 3 FAILED\n"));
        assert!(footer(0, 1.0, Some(true)).contains("# Avg bus bandwidth    : 1 OK\n"));
    }

    #[test]
    fn optional_columns_line_up_with_their_headers() {
        let columns = Columns { per_call: true, timestamps: true };
        let label = Label { bytes: 1024, count: 256, dtype: "float", op: "sum", root: -1 };
        let half = Half { per_call: Summary::of(&[1e-6, 3e-6]), ..half(Some(0)) };
        let row = label.text() + &columns.half(&half) + &columns.half(&half);
        let row = row + &columns.end("2026-11-20 12:00:00");
        let header = columns.header();
        let names = header.lines().nth(2).unwrap();
        let ends = |text: &str| {
            let mut ends = Vec::new();
            let bytes = text.as_bytes();
            for i in 0..bytes.len() {
                if bytes[i] != b' ' && bytes.get(i + 1).is_none_or(|&b| b == b' ') {
                    ends.push(i);
                }
            }
            ends
        };
        // The `#` that opens the header line is no column.
        let names: Vec<usize> = ends(&names[1..]).into_iter().map(|end| end + 1).collect();
        assert_eq!(names.len(), 5 + 8 + 8 + 1);
        assert_eq!(names[..21], ends(&row)[..21]);
        assert!(row.ends_with("  2026-11-20 12:00:00\n"));
    }
}
