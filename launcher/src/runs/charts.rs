//! Figures of trainings against their steps, as SVG that stands in a page.

use super::read::{Step, Training};
use crate::colours::COLOURS;
use crate::human;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use std::ops::Range;

const SIZE: (u32, u32) = (620, 300);
const GRID: RGBColor = RGBColor(225, 225, 225);
/// The most points of a line: more of them nobody sees.
const MOST: usize = 600;

/// One line: which training it is of, and its points by steps.
pub struct Line {
    pub training: usize,
    pub points: Vec<(f64, f64)>,
    /// Points for themselves, of what is not measured at each step.
    pub marked: bool,
}

/// What lines are of.
pub struct Chart {
    pub title: String,
    pub unit: &'static str,
    pub lines: Vec<Line>,
    /// Whether 0 is on the axis.
    pub from_zero: bool,
    /// How many steps a point is the mean of, at most.
    pub each: usize,
}

type Axes<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// Of these neighbours one point each, so that there are few enough: their means, and how many that are.
fn thinned(points: &[(f64, f64)]) -> (Vec<(f64, f64)>, usize) {
    let each = points.len().div_ceil(MOST).max(1);
    let mean = |few: &[(f64, f64)]| {
        let n = few.len() as f64;
        (few.iter().map(|p| p.0).sum::<f64>() / n, few.iter().map(|p| p.1).sum::<f64>() / n)
    };
    (points.chunks(each).map(mean).collect(), each)
}

impl Chart {
    /// Something of each step of several trainings; none where no step has it.
    pub fn of(
        title: &str,
        unit: &'static str,
        trainings: &[Training],
        of: impl Fn(&Step) -> f64,
    ) -> Option<Self> {
        let mut chart = Chart { title: title.into(), unit, lines: Vec::new(), from_zero: false, each: 1 };
        for (training, Training { steps, .. }) in trainings.iter().enumerate() {
            let points: Vec<_> = steps.iter().map(|step| (step.number as f64, of(step))).collect();
            // What is no number breaks a line, and is not told by a mean.
            for part in points.split(|point| !can_be_drawn(point.1)).filter(|part| !part.is_empty()) {
                let (points, each) = thinned(part);
                chart.each = chart.each.max(each);
                chart.lines.push(Line { training, points, marked: false });
            }
        }
        (!chart.lines.is_empty()).then_some(chart)
    }

    /// Adds what was found now and then, joined within each of `marks`.
    pub fn with_marks(mut self, marks: impl Iterator<Item = (usize, Vec<(u64, f64)>)>) -> Self {
        for (training, found) in marks {
            let drawn = found.into_iter().filter(|point| can_be_drawn(point.1));
            let points: Vec<_> = drawn.map(|(step, value)| (step as f64, value)).collect();
            if !points.is_empty() {
                self.lines.push(Line { training, points, marked: true });
            }
        }
        self
    }

    /// With 0 on the axis.
    pub fn with_zero(self) -> Self {
        Chart { from_zero: true, ..self }
    }

    /// The figure.
    ///
    /// # Errors
    /// Those of drawing.
    pub fn svg(&self) -> std::result::Result<String, Box<dyn std::error::Error>> {
        drawn(|area| {
            let points = || self.lines.iter().flat_map(|line| &line.points);
            let steps = extent(points().map(|p| p.0));
            let (least, most) = extent(points().map(|p| p.1));
            let least = if self.from_zero { least.min(0.0) } else { least };
            let (low, high) = room(least, most, self.from_zero);
            let mut chart = axes(area, steps, low..high, self.unit)?;
            for line in &self.lines {
                let colour = COLOURS[line.training % COLOURS.len()];
                // A line of one point would not be seen.
                if line.marked || line.points.len() == 1 {
                    let marks = line.points.iter().map(|&at| Circle::new(at, 3, colour.filled()));
                    chart.draw_series(marks)?;
                }
                chart.draw_series(LineSeries::new(line.points.iter().copied(), colour.stroke_width(1)))?;
            }
            Ok(())
        })
    }
}

/// A part of a step's time.
pub struct Part {
    pub name: &'static str,
    pub colour: RGBColor,
    seconds: fn(&Step) -> f64,
}

/// The parts, in the order in which they lie on each other.
pub const PARTS: [Part; 4] = [
    Part { name: "forward and backward", colour: COLOURS[0], seconds: |step| step.compute },
    Part { name: "exposed communication", colour: COLOURS[1], seconds: |step| step.exposed },
    Part { name: "clipping and optimizer", colour: COLOURS[2], seconds: |step| step.optimizer },
    Part { name: "other", colour: RGBColor(190, 190, 190), seconds: Step::rest },
];

/// Where the time of a training's steps went, each part above the one before.
///
/// # Errors
/// Those of drawing.
pub fn parts(training: &Training) -> std::result::Result<String, Box<dyn std::error::Error>> {
    drawn(|area| {
        let mut below = vec![0.0; training.steps.len()];
        let layers = PARTS.map(|part| {
            let steps = training.steps.iter().zip(&mut below);
            let tops = steps.map(|(step, top)| {
                let time = (part.seconds)(step) * 1e3;
                *top += if can_be_drawn(time) { time } else { 0.0 };
                (step.number as f64, *top)
            });
            (part.colour, thinned(&tops.collect::<Vec<_>>()).0)
        });
        let steps = extent(layers[0].1.iter().map(|p| p.0));
        let (_, high) = room(0.0, layers[3].1.iter().map(|p| p.1).fold(0.0, f64::max), true);
        let mut chart = axes(area, steps, 0.0..high, "ms a step")?;
        for (colour, points) in layers.iter().rev() {
            let mut outline = points.clone();
            // One step is as wide as the figure.
            if let [only] = outline[..] {
                outline.push((only.0 + 1.0, only.1));
            }
            let (from, to) = (outline[0].0, outline[outline.len() - 1].0);
            outline.extend([(to, 0.0), (from, 0.0)]);
            chart.draw_series([Polygon::new(outline, colour.filled())])?;
        }
        Ok(())
    })
}

/// Whether a value has a place on an axis: between two that are as large as numbers get there are none to mark.
fn can_be_drawn(value: f64) -> bool {
    value.abs() < 1e300
}

fn drawn(
    draw: impl FnOnce(&DrawingArea<SVGBackend<'_>, Shift>) -> Drawn,
) -> std::result::Result<String, Box<dyn std::error::Error>> {
    let mut text = String::new();
    let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    draw(&area)?;
    area.present()?;
    drop(area);
    Ok(text)
}

/// Where lines are drawn: steps to the right, and what they are of upwards.
fn axes<'a>(
    area: &DrawingArea<SVGBackend<'a>, Shift>,
    steps: (f64, f64),
    values: Range<f64>,
    unit: &str,
) -> std::result::Result<Axes<'a>, Box<dyn std::error::Error>> {
    let mut chart = ChartBuilder::on(area)
        .margin(8)
        .x_label_area_size(34)
        .y_label_area_size(64)
        .build_cartesian_2d(steps.0..steps.1.max(steps.0 + 1.0), values)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("step").y_desc(unit).x_labels(6).y_labels(6);
    mesh.light_line_style(TRANSPARENT).bold_line_style(GRID);
    mesh.x_label_formatter(&|x| human::count(*x)).y_label_formatter(&|y| human::rate(*y)).draw()?;
    drop(mesh);
    Ok(chart)
}

fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)))
}

/// An axis on which the values have room, also if all are one.
fn room(least: f64, most: f64, from_zero: bool) -> (f64, f64) {
    let span = match most - least {
        span if span > 0.0 => span,
        _ if most != 0.0 => most.abs(),
        _ => 1.0,
    };
    let low = if from_zero && least >= 0.0 { 0.0 } else { least - 0.05 * span };
    (low, most + 0.05 * span)
}

#[cfg(test)]
mod tests {
    use super::super::read::tests::{read, step};
    use super::*;
    use serde_json::json;

    #[test]
    fn many_points_become_means_of_neighbours() {
        let points: Vec<(f64, f64)> = (0..1500).map(|i| (f64::from(i), f64::from(i % 3))).collect();
        let (few, each) = thinned(&points);
        assert_eq!((few.len(), each), (500, 3));
        assert_eq!((few[0], few[499]), ((1.0, 1.0), (1498.0, 1.0)));
        assert_eq!(thinned(&points[..600]), (points[..600].to_vec(), 1));
    }

    #[test]
    fn what_is_no_number_breaks_a_line() {
        let lines =
            [json!({"run": {}}), step(1, 5.0), step(2, 4.0), json!({"step": 3, "loss": null}), step(4, 3.0)];
        let training = [read(&lines).unwrap()];
        let chart = Chart::of("loss", "nats", &training, |s| s.loss).unwrap();
        let lengths: Vec<usize> = chart.lines.iter().map(|line| line.points.len()).collect();
        assert_eq!(lengths, [2, 1]);
        let marked = chart.with_marks([(0, vec![(4, 3.5), (5, f64::NAN)])].into_iter());
        assert_eq!(marked.lines[2].points, [(4.0, 3.5)]);
        // One mark for what was found, and one for a line of a single point.
        assert_eq!(marked.svg().unwrap().matches("<circle").count(), 2);
        assert!(Chart::of("scale", "", &training, |s| s.scale.unwrap_or(f64::NAN)).is_none());
        assert!(parts(&training[0]).unwrap().matches("<polygon").count() == PARTS.len());
    }

    /// Metrics of others, or damaged ones, may have any number.
    #[test]
    fn numbers_at_the_end_of_their_range_are_left_out() {
        for (one, other) in [(1e308, -1e308), (1.7e308, 1.0), (1e299, -1e299)] {
            let mut long = step(3, 2.0);
            long["compute_seconds"] = json!(1.7e306);
            let training = [read(&[json!({"run": {}}), step(1, one), step(2, other), long]).unwrap()];
            let chart = Chart::of("loss", "nats", &training, |s| s.loss).unwrap();
            assert!(
                chart.svg().unwrap().ends_with("</svg>\n")
                    && parts(&training[0]).unwrap().ends_with("</svg>\n")
            );
        }
    }

    #[test]
    fn axes_have_room_for_one_value_too() {
        assert_eq!(room(0.0, 0.0, true), (0.0, 0.05));
        assert_eq!(room(2.0, 2.0, false), (1.9, 2.1));
        assert_eq!(room(-1.0, 1.0, true), (-1.1, 1.1));
        let one = [read(&[json!({"run": {}}), step(1, 5.0)]).unwrap()];
        assert!(Chart::of("loss", "nats", &one, |s| s.loss).unwrap().svg().unwrap().contains("<circle"));
        assert!(parts(&one[0]).unwrap().contains("<polygon"));
    }
}
