//! What tells the subjects of a figure apart.

use plotters::style::RGBColor;

/// Distinguishable by people who see fewer colours (Okabe and Ito's set without its yellow).
pub const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(0, 0, 0),
];
