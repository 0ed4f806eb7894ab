//! How the lines of a figure are told apart.

use super::Series;
use crate::colours::COLOURS;
use plotters::prelude::*;
use std::collections::HashSet;

/// How a line is told from the others, also by who sees no colours.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Look {
    colour: RGBColor,
    pub shape: Mark,
    width: u32,
    /// Dashes and hollow marks.
    pub in_place: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Circle,
    Triangle,
    Square,
    Cross,
}

const MARKS: [Mark; 4] = [Mark::Circle, Mark::Triangle, Mark::Square, Mark::Cross];

/// Of lines, in pixels.
const WIDTHS: [u32; 3] = [2, 4, 1];

/// The most subjects whose lines can be told apart.
pub const MOST_LINES: usize = COLOURS.len() * MARKS.len() * WIDTHS.len();

/// How many subjects there are.
pub(super) fn subjects(series: &[Series]) -> usize {
    let named: HashSet<&str> = series.iter().map(|s| s.subject.as_str()).collect();
    named.len()
}

/// A look for each line: the two placements of one subject share colour, mark and width.
pub(super) fn looks(series: &[Series]) -> Vec<Look> {
    let mut subjects: Vec<&str> = Vec::new();
    let look = |s| {
        let Series { subject, in_place, .. }: &Series = s;
        let i = subjects.iter().position(|known| known == subject).unwrap_or_else(|| {
            subjects.push(subject);
            subjects.len() - 1
        });
        let (colour, shape) = (COLOURS[i % COLOURS.len()], MARKS[i / COLOURS.len() % MARKS.len()]);
        let width = WIDTHS[i / COLOURS.len() / MARKS.len() % WIDTHS.len()];
        Look { colour, shape, width, in_place: *in_place }
    };
    series.iter().map(look).collect()
}

impl Look {
    pub fn line(self) -> ShapeStyle {
        self.colour.stroke_width(self.width)
    }

    pub fn mark(self) -> ShapeStyle {
        if self.in_place { self.colour.stroke_width(1) } else { self.colour.filled() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(subject: &str, in_place: bool) -> Series {
        Series { subject: subject.to_owned(), in_place, cycles: 1, points: vec![] }
    }

    #[test]
    fn lines_are_told_apart_without_colours_and_beyond_them() {
        let pair = |i: usize| [false, true].map(|in_place| series(&format!("subject {i}"), in_place));
        let looks = looks(&(0..MOST_LINES).flat_map(pair).collect::<Vec<_>>());
        for (i, look) in looks.iter().enumerate() {
            assert!(!looks[..i].contains(look), "line {i} looks like another: {look:?}");
        }
        assert!(looks.len() >= 2 * 50, "all types and reductions");
        // One colour and mark to a pair, of which one is dashed and hollow.
        assert_eq!(looks[0], Look { in_place: false, ..looks[1] });
    }
}
