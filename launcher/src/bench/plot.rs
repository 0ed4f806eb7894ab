//! A figure of one or several runs: bus bandwidth and time against size.

mod look;
mod series;

use super::table::significant;
use crate::failure::{Failure, Result};
use crate::machine::PROGRAM;
pub use look::MOST_LINES;
use look::{Look, Mark, looks, subjects};
use plotters::coord::ranged1d::ValueFormatter;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use series::Point;
pub use series::Series;

const WIDTH: u32 = 1240;
/// Without the names.
const HEIGHT: u32 = 540;
/// Of a name's line.
const LINE: u32 = 18;
/// The longest name that leaves room for another beside it; twice as much is a whole line.
const HALF: usize = 80;

/// Draws an SVG.
///
/// # Errors
/// Nothing to draw, or more lines than can be told apart.
pub fn svg(series: &[Series], title: &str) -> Result<String> {
    let points = || series.iter().flat_map(|s| s.points.iter());
    if points().next().is_none() {
        return Err(Failure::usage("there is nothing to draw: no result has a size above 0"));
    }
    let lines = subjects(series);
    if lines > MOST_LINES {
        return Err(Failure::usage(format!(
            "a figure tells {MOST_LINES} lines apart, and these results make {lines}: draw fewer of them into one"
        )));
    }
    let mut text = String::new();
    draw(series, title, &mut text).map_err(|e| Failure::run(format!("drawing the figure: {e}")))?;
    // By which it is known later for one that may be replaced.
    text.insert_str(text.find(">\n").map_or(0, |at| at + 2), &format!("<!-- generator: {PROGRAM} -->\n"));
    Ok(text)
}

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

fn draw(series: &[Series], title: &str, text: &mut String) -> Drawn {
    let names: Vec<String> = series.iter().map(Series::name).collect();
    let looks = looks(series);
    let columns = if names.iter().all(|name| name.chars().count() <= HALF) { 2 } else { 1 };
    // Where they differ may be at their ends.
    let names: Vec<Vec<String>> = names.iter().map(|name| folded(name, 2 * HALF / columns)).collect();
    let foot = LINE * (names.iter().map(Vec::len).sum::<usize>().div_ceil(columns) as u32 + 1);
    let root = SVGBackend::with_string(text, (WIDTH, HEIGHT + foot)).into_drawing_area();
    root.fill(&WHITE)?;
    let below = root.titled(title, ("sans-serif", 20))?;
    let (panels, foot) = below.split_vertically(below.dim_in_pixel().1 - foot);
    let (left, right) = panels.split_horizontally(WIDTH as i32 / 2);
    let sizes = extent(series.iter().flat_map(|s| s.points.iter().map(|p| p.0)));
    let sizes = widened(sizes, 1.3, 2.0);

    let fastest = series.iter().flat_map(|s| s.points.iter().map(|p| p.2)).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(&left)
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(80)
        .build_cartesian_2d((sizes.0..sizes.1).log_scale().base(2.0), 0.0..(fastest * 1.08).max(1e-3))?;
    decorate(&mut chart, "bus bandwidth (GB/s)", |y| significant(*y))?;
    lines(&mut chart, series, &looks, |p| (p.0, p.2))?;

    let times = extent(series.iter().flat_map(|s| s.points.iter().map(|p| p.1.max(1e-3))));
    let times = widened(times, 1.5, 10.0);
    let mut chart = ChartBuilder::on(&right)
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(70)
        .build_cartesian_2d((sizes.0..sizes.1).log_scale().base(2.0), (times.0..times.1).log_scale())?;
    decorate(&mut chart, "time (us)", |y| significant(*y))?;
    lines(&mut chart, series, &looks, |p| (p.0, p.1.max(1e-3)))?;

    let mut row = 0;
    for (i, (name, look)) in names.iter().zip(&looks).enumerate() {
        let column = i % columns;
        let (x, y) =
            ((12 + column * (WIDTH as usize / columns)) as i32, (row as u32 * LINE + LINE / 2) as i32);
        match look.in_place {
            true => foot.draw(&DashedPathElement::new([(x, y), (x + 28, y)], 5, 4, look.line()))?,
            false => foot.draw(&PathElement::new([(x, y), (x + 28, y)], look.line()))?,
        }
        let (at, style) = ((x + 14, y), look.mark());
        match look.shape {
            Mark::Circle => foot.draw(&Circle::new(at, 3, style))?,
            Mark::Triangle => foot.draw(&TriangleMarker::new(at, 5, style))?,
            Mark::Square => foot.draw(&(EmptyElement::at(at) + Rectangle::new(SQUARE, style)))?,
            Mark::Cross => foot.draw(&Cross::new(at, 4, style))?,
        }
        for (below, line) in name.iter().enumerate() {
            let y = y - 7 + below as i32 * LINE as i32;
            foot.draw(&Text::new(line.as_str(), (x + 36, y), ("sans-serif", 14)))?;
        }
        if column + 1 == columns {
            row += name.len();
        }
    }
    root.present()?;
    Ok(())
}

/// In lines of at most so many characters.
fn folded(name: &str, most: usize) -> Vec<String> {
    let all: Vec<char> = name.chars().collect();
    all.chunks(most).map(|line| line.iter().collect()).collect()
}

/// Two corners of a square around its point, in pixels.
const SQUARE: [(i32, i32); 2] = [(-3, -3), (3, 3)];

fn decorate<Y>(
    chart: &mut ChartContext<'_, SVGBackend<'_>, Cartesian2d<LogCoord<f64>, Y>>,
    y_name: &str,
    y_label: impl Fn(&f64) -> String,
) -> Drawn
where
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    chart
        .configure_mesh()
        .x_desc("size (bytes)")
        .y_desc(y_name)
        .x_labels(12)
        .x_label_formatter(&|x| size(*x))
        .y_label_formatter(&y_label)
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 15))
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(225, 225, 225))
        .draw()?;
    Ok(())
}

fn lines<Y: Ranged<ValueType = f64>>(
    chart: &mut ChartContext<'_, SVGBackend<'_>, Cartesian2d<LogCoord<f64>, Y>>,
    series: &[Series],
    looks: &[Look],
    at: impl Fn(&Point) -> (f64, f64),
) -> Drawn {
    for (s, look) in series.iter().zip(looks) {
        let points: Vec<(f64, f64)> = s.points.iter().map(&at).collect();
        match look.in_place {
            true => chart.draw_series(DashedLineSeries::new(points.clone(), 5, 4, look.line()))?,
            false => chart.draw_series(LineSeries::new(points.clone(), look.line()))?,
        };
        let (points, style) = (points.into_iter(), look.mark());
        match look.shape {
            Mark::Circle => chart.draw_series(points.map(|at| Circle::new(at, 3, style)))?,
            Mark::Triangle => chart.draw_series(points.map(|at| TriangleMarker::new(at, 5, style)))?,
            Mark::Square => {
                chart.draw_series(points.map(|at| EmptyElement::at(at) + Rectangle::new(SQUARE, style)))?
            }
            Mark::Cross => chart.draw_series(points.map(|at| Cross::new(at, 4, style)))?,
        };
    }
    Ok(())
}

fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), v| (low.min(v), high.max(v)))
}

/// A logarithmic axis for what is between, with room beside it and at least two powers of its base, which get numbers.
fn widened((low, high): (f64, f64), room: f64, base: f64) -> (f64, f64) {
    let (low, high) = (low / room, high * room);
    let (below, above) = (low.log(base), high.log(base));
    match above.floor() - below.ceil() >= 1.0 {
        true => (low, high),
        false => (base.powf(below.floor()), base.powf(above.ceil())),
    }
}

/// `64K`, as sizes are given on the command line.
fn size(bytes: f64) -> String {
    let (value, suffix) = match bytes {
        b if b >= (1u64 << 30) as f64 => (b / (1u64 << 30) as f64, "G"),
        b if b >= (1u64 << 20) as f64 => (b / (1u64 << 20) as f64, "M"),
        b if b >= 1024.0 => (b / 1024.0, "K"),
        b => (b, ""),
    };
    format!("{}{suffix}", significant(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::example;
    use serde_json::json;

    #[test]
    fn axes_have_numbers() {
        // Whatever one size takes, and however little.
        assert_eq!(widened((200.0, 200.0), 1.5, 10.0), (100.0, 1000.0));
        assert_eq!(widened((16.0, 60.0), 1.5, 10.0), (10.0, 100.0));
        assert_eq!(widened((2.5, 3000.0), 1.5, 10.0), (2.5 / 1.5, 3000.0 * 1.5));
        assert_eq!(widened((3.0, 3.0), 1.3, 2.0), (2.0, 4.0));
    }

    #[test]
    fn several_runs_share_a_figure() {
        let dir = tempfile::tempdir().unwrap();
        let mut files = Vec::new();
        for (name, transport, scale) in [("a", "shm", 1.0), ("b", "mpi", 3.0), ("c", "mpi", 4.0)] {
            let run =
                example(transport, &[(1024, 1e-6 * scale), (65536, 9e-6 * scale), (1 << 26, 0.004 * scale)]);
            let path = dir.path().join(format!("{name}.json"));
            std::fs::write(&path, run.json(None).to_string()).unwrap();
            files.push(path);
        }
        let series = Series::read(&files).unwrap();
        let names: Vec<String> = series.iter().map(Series::name).collect();
        assert_eq!(
            names,
            [
                "all_gather shm float 2 ranks",
                "all_gather shm float 2 ranks, in place",
                "b: all_gather mpi float 2 ranks",
                "b: all_gather mpi float 2 ranks, in place",
                "c: all_gather mpi float 2 ranks",
                "c: all_gather mpi float 2 ranks, in place",
            ]
        );
        let figure = svg(&series, "all_gather").unwrap();
        assert!(figure.starts_with("<svg") && figure.trim_end().ends_with("</svg>"));
        for text in names.iter().map(String::as_str).chain([
            "bus bandwidth (GB/s)",
            "time (us)",
            "size (bytes)",
            "1M",
        ]) {
            assert!(figure.contains(text), "no {text} in the figure");
        }
        // Three points in each of six lines of both panels, and one beside each name.
        assert_eq!(figure.matches("<circle").count(), 3 * 6 * 2 + 6);
    }

    /// Lines of so many subjects, out of place and in place.
    fn pairs(subjects: usize) -> Vec<Series> {
        let of = |i: usize| {
            [false, true].map(|in_place| {
                let points = vec![(1024.0, i as f64 + 1.0, 1.0), (4096.0, i as f64 + 2.0, 2.0)];
                Series { subject: format!("subject {i}"), in_place, cycles: 1, points }
            })
        };
        (0..subjects).flat_map(of).collect()
    }

    #[test]
    fn in_place_lines_are_dashed_and_their_marks_hollow() {
        let figure = svg(&pairs(1), "two lines").unwrap();
        assert!(figure.contains("fill=\"none\""), "{figure}");
        let segments = figure.matches("<polyline").count() + figure.matches("<line").count();
        let solid = svg(&pairs(1)[..1], "one line").unwrap();
        assert!(segments > 2 * (solid.matches("<polyline").count() + solid.matches("<line").count()));
    }

    #[test]
    fn names_stand_below_the_panels_however_many() {
        let of = |part: &str, key: &str| -> f64 {
            part.split_once(&format!("{key}=\"")).unwrap().1.split('"').next().unwrap().parse().unwrap()
        };
        for subjects in [1, 50] {
            let series = pairs(subjects);
            let figure = svg(&series, "many").unwrap();
            let height = of(&figure, " height");
            let mut places = Vec::new();
            for s in &series {
                let text =
                    figure.split("<text ").find(|text| text.contains(&format!("\n{}\n", s.name()))).unwrap();
                let (x, y) = (of(text, "x"), of(text, "y"));
                assert!(y > f64::from(HEIGHT) - 20.0 && y < height, "{text}");
                assert!(!places.contains(&(x as u32, y as u32)), "{text}");
                places.push((x as u32, y as u32));
            }
        }
    }

    #[test]
    fn a_name_that_is_too_long_for_a_line_goes_on_below() {
        let mut series = pairs(2);
        let ends = ["north", "south"].map(|end| format!("{}{end}", "é".repeat(300)));
        series[0].subject = ends[0].clone();
        series[2].subject = ends[1].clone();
        let figure = svg(&series, "long").unwrap();
        let texts: Vec<&str> = figure.split("<text ").filter_map(|text| text.split('\n').nth(1)).collect();
        assert!(texts.iter().all(|text| text.chars().count() <= 2 * HALF), "{texts:?}");
        for end in ends {
            assert!(texts.windows(2).any(|pair| pair.concat() == end), "{texts:?}");
        }
        // Four names, two of which have two lines.
        let height = HEIGHT + LINE * (4 + 2 + 1);
        assert!(figure.contains(&format!(" height=\"{height}\"")), "{figure}");
    }

    #[test]
    fn results_of_nccl_tests_are_drawn_too() {
        let json = json!({"version": 3, "results": [
            {"size": 0, "type": "float", "redop": "sum", "root": "    -1",
             "out_of_place": {"time": 1.5, "alg_bw": 0, "bus_bw": 0, "nwrong": 0}, "in_place": null},
            {"size": 2048, "type": "float", "redop": "sum", "root": "    -1",
             "out_of_place": {"time": 2.5, "alg_bw": 1, "bus_bw": 1.5, "nwrong": 0}, "in_place": null},
            {"size": 4096, "type": "float", "redop": "sum", "root": "    -1",
             "out_of_place": {"cpu_time": 3.5, "bus_bw": 2.5}, "in_place": {"time": 1, "bus_bw": "-nan"}},
        ]});
        let series = Series::of_json(&json, "h100").unwrap();
        let points = vec![(2048.0, 2.5, 1.5), (4096.0, 3.5, 2.5)];
        let one = Series { subject: "h100 float sum".into(), in_place: false, cycles: 1, points };
        assert_eq!(series, [one]);
        svg(&series, "two points").unwrap();
    }

    #[test]
    fn names_have_no_characters_that_xml_has_not() {
        let json = json!({"operation": "all\u{1}gather\n\u{ffff}", "results": [
            {"size": 8, "type": "<float>", "out_of_place": {"time": 2.5, "bus_bw": 1.5}},
        ]});
        let series = Series::of_json(&json, "").unwrap();
        assert_eq!(series[0].name(), "all\u{fffd}gather\u{fffd}\u{fffd} <float>");
        let figure = svg(&series, "odd").unwrap();
        assert!(figure.contains("all\u{fffd}gather\u{fffd}\u{fffd} &lt;float&gt;"), "{figure}");
        assert!(!figure.contains(['\u{1}', '\u{ffff}']), "{figure}");
    }

    #[test]
    fn what_cannot_be_drawn_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        for (content, words) in [
            ("{", "is not JSON"),
            ("{}", "'results'"),
            (r#"{"results": [{"size": "big"}]}"#, "'size' in entry 0"),
            (r#"{"results": [{"size": 8, "in_place": {"time": 1}}]}"#, "'bus_bw' in entry 0"),
            (r#"{"results": [{"size": 1e17}, {"size": 1e-300}]}"#, "neither 0 nor 1 and more"),
            (r#"{"results": [{"size": -8}]}"#, "'size' in entry 0 of 'results' that is neither"),
        ] {
            std::fs::write(&path, content).unwrap();
            let e = Series::read(&[&path]).unwrap_err();
            assert!(
                e.code() == 2 && e.to_string().contains(words) && e.to_string().contains("x.json"),
                "{e}"
            );
        }
        assert!(
            Series::read(&[dir.path().join("none.json")]).unwrap_err().to_string().contains("cannot be read")
        );
        assert!(svg(&[], "nothing").unwrap_err().to_string().contains("nothing to draw"));
        let e = svg(&pairs(85), "too many").unwrap_err();
        assert!(e.code() == 2 && e.to_string().contains("84 lines apart, and these results make 85"), "{e}");
        svg(&pairs(84), "many").unwrap();
    }

    #[test]
    fn ticks_read_like_flags() {
        assert_eq!(
            [1.0, 1024.0, 65536.0, 1.5 * 1048576.0, 1073741824.0].map(size),
            ["1", "1K", "64K", "1.5M", "1G"]
        );
    }
}
