//! A figure of one or several runs: bus bandwidth and time against size.

use super::record::Run;
use crate::failure::{Failure, Result};
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;
use serde_json::Value;
use std::path::Path;

/// One line of a figure: (bytes, microseconds, GB/s), by size.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64, f64)>,
}

/// Distinguishable by people who see fewer colours (Okabe and Ito's set without its yellow).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
];

const WIDTH: u32 = 1240;
const HEIGHT: u32 = 540;

impl Series {
    /// The two placements of a run that is still in memory.
    pub fn of_run(run: &Run) -> Vec<Series> {
        let json = run.json(None);
        Self::of_json(&json, "").unwrap_or_default()
    }

    /// The lines of what `--json` wrote (or nccl-tests' `-J`): out of place, and in place where it differs. One
    /// line per type, reduction and root.
    ///
    /// # Errors
    /// What is missing, as the end of a sentence.
    pub fn of_json(json: &Value, fallback: &str) -> std::result::Result<Vec<Series>, String> {
        let results = json["results"].as_array().ok_or("has no list 'results'")?;
        let operation = json["operation"].as_str().unwrap_or(fallback);
        let transport = json["transport"].as_str().unwrap_or("");
        let mut all: Vec<Series> = Vec::new();
        for (i, row) in results.iter().enumerate() {
            let field = |value: &Value, what: &str| {
                value.as_f64().ok_or_else(|| format!("has no number '{what}' in entry {i} of 'results'"))
            };
            let bytes = field(&row["size"], "size")?;
            let text = |key: &str| row[key].as_str().unwrap_or("").trim().to_owned();
            let mut name = [operation, transport].map(str::to_owned).to_vec();
            name.extend([text("type"), text("redop")].into_iter().filter(|t| t != "none"));
            let root = text("root");
            if !matches!(root.as_str(), "" | "-1" | "0") {
                name.push(format!("root {root}"));
            }
            if let Some(ranks) = json["ranks"].as_u64() {
                name.push(format!("{ranks} ranks"));
            }
            name.retain(|part| !part.is_empty());
            for (placement, suffix) in [("out_of_place", ""), ("in_place", ", in place")] {
                let half = &row[placement];
                if half.is_null() {
                    continue;
                }
                let point = (bytes, field(&half["time"], "time")?, field(&half["bus_bw"], "bus_bw")?);
                let name = name.join(" ") + suffix;
                match all.iter_mut().find(|s| s.name == name) {
                    Some(series) => series.points.push(point),
                    None => all.push(Series { name, points: vec![point] }),
                }
            }
        }
        for series in &mut all {
            // Sizes of 0 have no place on a logarithmic axis.
            series.points.retain(|p| p.0 > 0.0);
            series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        all.retain(|s| !s.points.is_empty());
        Ok(all)
    }

    /// From files; a line's name starts with its file's when several files would give the same name.
    ///
    /// # Errors
    /// A file that cannot be read or is no result.
    pub fn read(files: &[impl AsRef<Path>]) -> Result<Vec<Series>> {
        let mut per_file = Vec::new();
        for file in files {
            let path = file.as_ref();
            let refuse = |what: String| Failure::usage(format!("{} {what}", path.display()));
            let text = std::fs::read_to_string(path).map_err(|e| refuse(format!("cannot be read: {e}")))?;
            let json: Value = serde_json::from_str(&text).map_err(|e| refuse(format!("is not JSON: {e}")))?;
            let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let series = Self::of_json(&json, &stem).map_err(|e| {
                refuse(format!("{e}: give files that 'caravan bench OPERATION --json FILE' wrote"))
            })?;
            per_file.push((stem, series));
        }
        let names: Vec<String> =
            per_file.iter().flat_map(|(_, s)| s.iter().map(|s| s.name.clone())).collect();
        let unique = |name: &String| names.iter().filter(|n| *n == name).count() == 1;
        let renamed = per_file
            .into_iter()
            .flat_map(|(stem, series)| series.into_iter().map(move |s| (stem.clone(), s)));
        Ok(renamed
            .map(|(stem, s)| match unique(&s.name) {
                true => s,
                false => Series { name: format!("{stem}: {}", s.name), ..s },
            })
            .collect())
    }
}

/// Draws an SVG.
///
/// # Errors
/// Nothing to draw.
pub fn svg(series: &[Series], title: &str) -> Result<String> {
    let points = || series.iter().flat_map(|s| s.points.iter());
    if points().next().is_none() {
        return Err(Failure::usage("there is nothing to draw: no result has a size above 0"));
    }
    let mut text = String::new();
    draw(series, title, &mut text).map_err(|e| Failure::run(format!("drawing the figure: {e}")))?;
    Ok(text)
}

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

fn draw(series: &[Series], title: &str, text: &mut String) -> Drawn {
    let root = SVGBackend::with_string(text, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE)?;
    let root = root.titled(title, ("sans-serif", 20))?;
    let (left, right) = root.split_horizontally(WIDTH as i32 / 2);
    let sizes = extent(series.iter().flat_map(|s| s.points.iter().map(|p| p.0)));
    let widened = (sizes.0 / 1.3, sizes.1 * 1.3);

    let fastest = series.iter().flat_map(|s| s.points.iter().map(|p| p.2)).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(&left)
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(60)
        .build_cartesian_2d((widened.0..widened.1).log_scale().base(2.0), 0.0..(fastest * 1.08).max(1e-3))?;
    decorate(&mut chart, "bus bandwidth (GB/s)", |y| short(*y))?;
    lines(&mut chart, series, |p| (p.0, p.2))?;

    let times = extent(series.iter().flat_map(|s| s.points.iter().map(|p| p.1.max(1e-3))));
    let mut chart =
        ChartBuilder::on(&right).margin(12).x_label_area_size(42).y_label_area_size(70).build_cartesian_2d(
            (widened.0..widened.1).log_scale().base(2.0),
            (times.0 / 1.5..times.1 * 1.5).log_scale(),
        )?;
    decorate(&mut chart, "time (us)", |y| short(*y))?;
    lines(&mut chart, series, |p| (p.0, p.1.max(1e-3)))?;
    // Times grow with sizes, so that this corner is free.
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 14))
        .draw()?;
    root.present()?;
    Ok(())
}

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
    at: impl Fn(&(f64, f64, f64)) -> (f64, f64),
) -> Drawn {
    for (i, s) in series.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(s.points.iter().map(&at), style))?
            .label(&s.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        chart.draw_series(s.points.iter().map(|p| Circle::new(at(p), 3, colour.filled())))?;
    }
    Ok(())
}

fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), v| (low.min(v), high.max(v)))
}

/// `64K`, as sizes are given on the command line.
fn size(bytes: f64) -> String {
    let (value, suffix) = match bytes {
        b if b >= (1u64 << 30) as f64 => (b / (1u64 << 30) as f64, "G"),
        b if b >= (1u64 << 20) as f64 => (b / (1u64 << 20) as f64, "M"),
        b if b >= 1024.0 => (b / 1024.0, "K"),
        b => (b, ""),
    };
    format!("{}{suffix}", short(value))
}

/// As few digits as tell ticks apart.
fn short(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text.is_empty() { "0".into() } else { text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::example;
    use serde_json::json;

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
        let names: Vec<&str> = series.iter().map(|s| s.name.as_str()).collect();
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
        for text in names.iter().chain(&["bus bandwidth (GB/s)", "time (us)", "size (bytes)", "1M"]) {
            assert!(figure.contains(text), "no {text} in the figure");
        }
        // The names stand in the right panel, where no line is.
        let place = figure[..figure.find(names[0]).unwrap()].rsplit_once("<text x=\"").unwrap().1;
        assert!(place.split('"').next().unwrap().parse::<u32>().unwrap() > WIDTH / 2, "{place}");
        // Three points in each of six lines of both panels.
        assert_eq!(figure.matches("<circle").count(), 3 * 6 * 2);
    }

    #[test]
    fn results_of_nccl_tests_are_drawn_too() {
        let json = json!({"version": 3, "results": [
            {"size": 0, "type": "float", "redop": "sum", "root": "    -1",
             "out_of_place": {"time": 1.5, "alg_bw": 0, "bus_bw": 0, "nwrong": 0}, "in_place": null},
            {"size": 2048, "type": "float", "redop": "sum", "root": "    -1",
             "out_of_place": {"time": 2.5, "alg_bw": 1, "bus_bw": 1.5, "nwrong": 0}, "in_place": null},
        ]});
        let series = Series::of_json(&json, "h100").unwrap();
        assert_eq!(series, [Series { name: "h100 float sum".into(), points: vec![(2048.0, 2.5, 1.5)] }]);
        svg(&series, "one point").unwrap();
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
    }

    #[test]
    fn ticks_read_like_flags() {
        assert_eq!(
            [1.0, 1024.0, 65536.0, 1.5 * 1048576.0, 1073741824.0].map(size),
            ["1", "1K", "64K", "1.5M", "1G"]
        );
        assert_eq!([0.0, 0.001, 2.5, 1000.0, 100.0].map(short), ["0", "0.001", "2.5", "1000", "100"]);
    }
}
