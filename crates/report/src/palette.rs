//! Colors. Each has a value for light pages and print, and one for dark screens.
//!
//! Charts have the light values as attributes, so an SVG that is taken out of the page is legible. On a dark screen, style rules replace each
//! attribute by the dark value: this is why no two colors may have the same light value.

use plotters::style::RGBColor;

/// A color on light and on dark pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Color {
    /// On light pages, and in print.
    pub light: [u8; 3],
    /// On dark screens.
    pub dark: [u8; 3],
}

const fn color(light: u32, dark: u32) -> Color {
    const fn parts(value: u32) -> [u8; 3] {
        [(value >> 16) as u8, (value >> 8) as u8, value as u8]
    }
    Color {
        light: parts(light),
        dark: parts(dark),
    }
}

/// The page.
pub const PAPER: Color = color(0xff_ff_ff, 0x11_15_1a);
/// Boxes on the page.
pub const CARD: Color = color(0xf5_f7_f9, 0x1a_20_27);
/// Text.
pub const INK: Color = color(0x1c_24_30, 0xe6_ea_f0);
/// Text of less weight, and text in charts.
pub const SOFT: Color = color(0x4d_58_66, 0xa9_b4_c1);
/// Lines between parts, and grids.
pub const LINE: Color = color(0xd6_dc_e3, 0x33_3d_48);
/// Axes.
pub const AXIS: Color = color(0x7d_88_95, 0x7a_86_94);
/// Links and marks.
pub const ACCENT: Color = color(0x1a_56_b0, 0x86_b8_ff);
/// Box of a warning.
pub const WARN: Color = color(0xff_f3_dc, 0x3a_2d_12);
/// Text of a warning.
pub const WARN_INK: Color = color(0x66_41_00, 0xff_d9_94);

/// Curves, in the order in which placements get them.
pub const SERIES: [Color; 8] = [
    color(0x1f_5f_bf, 0x7f_b0_ff),
    color(0xb8_5c_00, 0xff_b0_66),
    color(0xb3_20_4d, 0xff_86_a8),
    color(0x1a_7f_4b, 0x5f_d3_9a),
    color(0x6b_46_c1, 0xb9_a0_ff),
    color(0x0b_72_85, 0x5c_cf_e0),
    color(0x7a_6a_00, 0xd9_c6_4a),
    color(0x5c_63_70, 0xb8_be_c8),
];

/// Kinds of CPU time, in the order of [`crate::line::KINDS`].
pub const KINDS: [Color; 7] = [
    color(0x2a_68_c8, 0x6f_a3_f0),
    color(0xc4_65_0a, 0xf0_a2_58),
    color(0xc9_cf_d7, 0x46_51_5e),
    color(0xa8_24_4f, 0xf0_7a_9e),
    color(0x73_4f_c9, 0xaf_95_f5),
    color(0x22_88_54, 0x55_c5_8e),
    color(0x6a_72_80, 0x9a_a2_ae),
];

/// Returns all colors of charts.
pub fn of_charts() -> impl Iterator<Item = Color> {
    [SOFT, LINE, AXIS].into_iter().chain(SERIES).chain(KINDS)
}

impl Color {
    /// Returns the color for a chart.
    pub fn in_chart(self) -> RGBColor {
        let [red, green, blue] = self.light;
        RGBColor(red, green, blue)
    }

    /// Returns the light color as charts write it.
    pub fn light_text(self) -> String {
        text(self.light)
    }

    /// Returns the dark color.
    pub fn dark_text(self) -> String {
        text(self.dark)
    }
}

fn text([red, green, blue]: [u8; 3]) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the contrast of two colors by the Web Content Accessibility Guidelines.
    fn contrast(one: [u8; 3], other: [u8; 3]) -> f64 {
        let linear = |value: u8| match f64::from(value) / 255.0 {
            value if value <= 0.040_45 => value / 12.92,
            value => ((value + 0.055) / 1.055).powf(2.4),
        };
        let luminance = |[red, green, blue]: [u8; 3]| {
            0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)
        };
        let (one, other) = (luminance(one), luminance(other));
        (one.max(other) + 0.05) / (one.min(other) + 0.05)
    }

    #[test]
    fn no_two_colors_of_charts_have_the_same_light_value() {
        let mut all: Vec<[u8; 3]> = of_charts().map(|color| color.light).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    /// The guidelines ask for 4.5 for text, and for 3 for graphics.
    #[test]
    fn text_and_curves_have_enough_contrast_in_both_schemes() {
        for back in [PAPER, CARD] {
            for (front, least) in [(INK, 7.0), (SOFT, 4.5), (ACCENT, 4.5)]
                .into_iter()
                .chain(SERIES.map(|color| (color, 3.0)))
            {
                assert!(
                    contrast(front.light, back.light) >= least,
                    "{front:?} on {back:?}, light"
                );
                assert!(
                    contrast(front.dark, back.dark) >= least,
                    "{front:?} on {back:?}, dark"
                );
            }
        }
        assert!(contrast(WARN_INK.light, WARN.light) >= 4.5);
        assert!(contrast(WARN_INK.dark, WARN.dark) >= 4.5);
    }
}
