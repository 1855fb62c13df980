//! Charts as SVG, of a width that fits a phone: wide pages have several side by side, and text keeps its size.
//!
//! The crate `plotters` draws axes and shapes. A chart has no title and no legend: the page has them as text.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;
use plotters::style::Color as _;

use crate::palette::{AXIS, Color, KINDS, LINE, SERIES, SOFT};
use crate::statistics::median;

/// Width of all charts.
const WIDTH: u32 = 360;
/// Height of the part with curves.
const CURVES_HEIGHT: u32 = 200;
/// Height of the part with bars below the curves.
const SHARES_HEIGHT: u32 = 116;
/// Width of the labels of values.
const VALUES_WIDTH: u32 = 48;
/// Height of the labels of categories.
const CATEGORIES_HEIGHT: u32 = 24;
const MARGIN: u32 = 8;
/// Height of a bar with its distance.
const BAR_HEIGHT: u32 = 26;
/// The backend divides it by 1.24.
const FONT_SIZE: u32 = 15;
/// Most labels below an axis.
const LABELS_MAX: usize = 12;

/// A chart could not be drawn.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot draw a chart: {0}")]
pub struct ChartError(String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for ChartError {
    fn from(error: DrawingAreaErrorKind<E>) -> ChartError {
        ChartError(error.to_string())
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Result<T> = std::result::Result<T, ChartError>;

/// A linear axis with labels at these values.
struct Axis {
    from: f64,
    to: f64,
    labels: Vec<f64>,
}

impl Axis {
    /// The axis of categories, each one wide, with the places of labels.
    fn of_categories(count: usize, labels: Vec<f64>) -> Axis {
        Axis {
            from: -0.5,
            to: count.max(1) as f64 - 0.5,
            labels,
        }
    }

    /// The same axis from its end to its begin.
    fn reversed(self) -> Axis {
        Axis {
            from: self.to,
            to: self.from,
            ..self
        }
    }
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (first, last): (i32, i32)) -> i32 {
        let part = (value - self.from) / (self.to - self.from);
        first + (part * f64::from(last - first)).round() as i32
    }

    fn key_points<H: KeyPointHint>(&self, _: H) -> Vec<f64> {
        self.labels.clone()
    }

    fn range(&self) -> Range<f64> {
        self.from..self.to
    }
}

/// A curve over categories.
pub struct Curve {
    /// The number of its color and mark.
    pub look: usize,
    /// For each category the value, with the least and the most of several runs.
    pub values: Vec<Option<Spread>>,
}

/// A value of several runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The least value.
    pub least: f64,
    /// The largest value.
    pub most: f64,
}

impl Spread {
    /// Returns the spread of some values. Returns `None` without values.
    pub fn of(values: &[f64]) -> Option<Spread> {
        Some(Spread {
            median: median(values)?,
            least: values.iter().copied().fold(f64::INFINITY, f64::min),
            most: values.iter().copied().fold(0.0, f64::max),
        })
    }
}

/// Shares below curves: for each curve its look, and for each category the share.
pub struct Shares {
    /// The number of its color.
    pub look: usize,
    /// Shares from 0 to 1. `None`: unknown.
    pub values: Vec<Option<f64>>,
}

/// Returns the color of a curve.
pub fn color_of(look: usize) -> Color {
    SERIES[look % SERIES.len()]
}

/// Draws curves over categories, and below them bars with shares. `unit` is that of the values.
pub fn curves_and_shares(
    categories: &[String],
    unit: &str,
    curves: &[Curve],
    shares: &[Shares],
) -> Result<String> {
    let height = CURVES_HEIGHT + SHARES_HEIGHT;
    draw((WIDTH, height), |area| {
        let (above, below) = area.split_vertically(CURVES_HEIGHT);
        draw_curves(&above, categories, unit, curves)?;
        draw_shares(&below, categories, shares)
    })
}

/// Draws times on a logarithmic scale over categories.
pub fn times(categories: &[String], curves: &[Curve]) -> Result<String> {
    let logarithm = |value: f64| value.max(1.0).log10();
    let values = || {
        curves
            .iter()
            .flat_map(|curve| curve.values.iter().flatten())
    };
    let least = values()
        .map(|spread| logarithm(spread.least))
        .fold(f64::INFINITY, f64::min);
    let most = values()
        .map(|spread| logarithm(spread.most))
        .fold(0.0, f64::max);
    let least = least.min(most).floor();
    let most = most.ceil().max(least + 1.0);
    let powers: Vec<f64> = (least as i32..=most as i32).map(f64::from).collect();
    draw((WIDTH, CURVES_HEIGHT + CATEGORIES_HEIGHT), |area| {
        let powers = Axis {
            from: least,
            to: most,
            labels: powers,
        };
        let mut chart = ChartBuilder::on(area)
            .margin(MARGIN)
            .margin_top(MARGIN * 2)
            .x_label_area_size(CATEGORIES_HEIGHT)
            .y_label_area_size(VALUES_WIDTH + 8)
            .build_cartesian_2d(below(categories.len()), powers)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(0)
            .bold_line_style(LINE.in_chart())
            .axis_style(AXIS.in_chart())
            .label_style(font())
            .x_label_formatter(&|place| label(categories, *place))
            .y_label_formatter(&|power| crate::text::time_tick(10_f64.powf(*power)))
            .draw()?;
        for curve in curves {
            let logarithms = |spread: &Spread| Spread {
                median: logarithm(spread.median),
                least: logarithm(spread.least),
                most: logarithm(spread.most),
            };
            let values = curve
                .values
                .iter()
                .map(|value| value.as_ref().map(logarithms));
            draw_curve(&mut chart, curve.look, &values.collect::<Vec<_>>())?;
        }
        Ok(())
    })
}

/// Draws horizontal bars of stacked parts, from above. The colors are those of the kinds of CPU time.
pub fn stacks(bars: &[(String, [f64; 7])]) -> Result<String> {
    let most = bars
        .iter()
        .map(|(_, parts)| parts.iter().sum::<f64>())
        .fold(0.0, f64::max);
    let most = above(most);
    let names: Vec<String> = bars.iter().map(|(name, _)| name.clone()).collect();
    draw((WIDTH, bars_height(bars.len())), |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(MARGIN)
            .margin_right(MARGIN * 2)
            .x_label_area_size(CATEGORIES_HEIGHT)
            .y_label_area_size(names_width(&names, WIDTH / 3))
            .build_cartesian_2d(0.0..most, beside(bars.len()))?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .max_light_lines(0)
            .x_labels(5)
            .bold_line_style(LINE.in_chart())
            .axis_style(AXIS.in_chart())
            .label_style(font())
            .x_label_formatter(&|value| crate::text::tick(*value))
            .y_label_formatter(&|place| label(&names, *place))
            .draw()?;
        for (index, (_, parts)) in bars.iter().enumerate() {
            let (mut left, middle) = (0.0, index as f64);
            for (kind, part) in parts.iter().enumerate().filter(|(_, part)| **part > 0.0) {
                let corners = [(left, middle - 0.34), (left + part, middle + 0.34)];
                chart.draw_series([Rectangle::new(corners, KINDS[kind].in_chart().filled())])?;
                left += part;
            }
        }
        Ok(())
    })
}

/// Draws intervals of ratios on a logarithmic scale beside a line at 1, from above. An interval has its ends and the estimate.
pub fn intervals(rows: &[(String, Spread, usize)]) -> Result<String> {
    let values = || {
        rows.iter()
            .flat_map(|(_, spread, _)| [spread.least, spread.most])
    };
    // At least from 4/5 to 5/4, so that noise does not look large.
    let reach = values()
        .map(|value| value.ln().abs())
        .fold(1.25_f64.ln(), f64::max)
        * 1.05;
    let names: Vec<String> = rows.iter().map(|(name, ..)| name.clone()).collect();
    let ticks: Vec<f64> = [0.01, 0.1, 0.2, 0.5, 0.8, 1.0, 1.25, 2.0, 5.0, 10.0, 100.0]
        .into_iter()
        .map(f64::ln)
        .filter(|tick| tick.abs() <= reach)
        .collect();
    draw((WIDTH, bars_height(rows.len())), |area| {
        let ratios = Axis {
            from: -reach,
            to: reach,
            labels: ticks,
        };
        let mut chart = ChartBuilder::on(area)
            .margin(MARGIN)
            .margin_right(MARGIN * 2)
            .x_label_area_size(CATEGORIES_HEIGHT)
            .y_label_area_size(names_width(&names, WIDTH / 2))
            .build_cartesian_2d(ratios, beside(rows.len()))?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .max_light_lines(0)
            .bold_line_style(LINE.in_chart())
            .axis_style(AXIS.in_chart())
            .label_style(font())
            .x_label_formatter(&|value| crate::text::tick(value.exp()))
            .y_label_formatter(&|place| label(&names, *place))
            .draw()?;
        let middle = [(0.0, -0.5), (0.0, rows.len() as f64 - 0.5)];
        chart.draw_series([PathElement::new(middle, SOFT.in_chart())])?;
        for (index, (_, spread, look)) in rows.iter().enumerate() {
            let (color, place) = (color_of(*look).in_chart(), index as f64);
            let ends = [(spread.least.ln(), place), (spread.most.ln(), place)];
            chart.draw_series([PathElement::new(ends, color.stroke_width(3))])?;
            chart.draw_series([Circle::new((spread.median.ln(), place), 5, color.filled())])?;
        }
        Ok(())
    })
}

/// Returns the height of an image with this many bars.
fn bars_height(count: usize) -> u32 {
    BAR_HEIGHT * count as u32 + CATEGORIES_HEIGHT + 2 * MARGIN
}

/// Returns the width of names beside a chart, `most` at the most.
fn names_width(names: &[String], most: u32) -> u32 {
    let longest = names.iter().map(|name| name.chars().count()).max();
    (longest.unwrap_or(0) as u32 * 7 + 10).min(most)
}

/// Makes an image and draws on it.
fn draw(size: (u32, u32), on: impl FnOnce(&Area) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        on(&area)?;
        area.present()?;
    }
    Ok(svg.replacen("<svg ", "<svg class=\"chart\" aria-hidden=\"true\" ", 1))
}

/// The axis of categories below a chart. If there are many, some have no label.
fn below(count: usize) -> Axis {
    let step = count.div_ceil(LABELS_MAX).max(1);
    let labels = (0..count).step_by(step).map(|place| place as f64);
    Axis::of_categories(count, labels.collect())
}

/// The axis of categories beside a chart, from above. All have a label.
fn beside(count: usize) -> Axis {
    let labels = (0..count).map(|place| place as f64);
    Axis::of_categories(count, labels.collect()).reversed()
}

fn label(names: &[String], place: f64) -> String {
    let name = names.get(place.round().max(0.0) as usize);
    name.cloned().unwrap_or_default()
}

/// Returns an end of an axis a little above the largest value.
fn above(most: f64) -> f64 {
    match most > 0.0 {
        true => most * 1.08,
        false => 1.0,
    }
}

fn font() -> TextStyle<'static> {
    ("sans-serif", FONT_SIZE)
        .into_font()
        .color(&SOFT.in_chart())
}

fn draw_curves(area: &Area, categories: &[String], unit: &str, curves: &[Curve]) -> Result<()> {
    let values = curves
        .iter()
        .flat_map(|curve| curve.values.iter().flatten());
    let most = above(values.map(|spread| spread.most).fold(0.0, f64::max));
    area.draw(&Text::new(unit.to_owned(), (2, 0), font()))?;
    let mut chart = ChartBuilder::on(area)
        .margin(MARGIN)
        .margin_top(MARGIN * 3)
        .y_label_area_size(VALUES_WIDTH)
        .build_cartesian_2d(Axis::of_categories(categories.len(), vec![]), 0.0..most)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .max_light_lines(0)
        .y_labels(5)
        .bold_line_style(LINE.in_chart())
        .axis_style(AXIS.in_chart())
        .label_style(font())
        .y_label_formatter(&|value| crate::text::tick(*value))
        .draw()?;
    for curve in curves {
        draw_curve(&mut chart, curve.look, &curve.values)?;
    }
    Ok(())
}

fn draw_shares(area: &Area, categories: &[String], shares: &[Shares]) -> Result<()> {
    let is_known = shares
        .iter()
        .any(|of| of.values.iter().any(Option::is_some));
    let title = match is_known {
        true => "local accesses",
        false => "local accesses: unknown",
    };
    area.draw(&Text::new(title, (2, 0), font()))?;
    let percent = Axis {
        from: 0.0,
        to: 1.0,
        labels: vec![0.0, 0.5, 1.0],
    };
    let mut chart = ChartBuilder::on(area)
        .margin(MARGIN)
        .margin_top(MARGIN * 3)
        .x_label_area_size(CATEGORIES_HEIGHT)
        .y_label_area_size(VALUES_WIDTH)
        .build_cartesian_2d(below(categories.len()), percent)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .max_light_lines(0)
        .bold_line_style(LINE.in_chart())
        .axis_style(AXIS.in_chart())
        .label_style(font())
        .x_label_formatter(&|place| label(categories, *place))
        .y_label_formatter(&|share| format!("{:.0} %", share * 100.0))
        .draw()?;
    let width = 0.8 / shares.len().max(1) as f64;
    for (index, of_curve) in shares.iter().enumerate() {
        let color = color_of(of_curve.look).in_chart();
        for (place, share) in of_curve.values.iter().enumerate() {
            let Some(share) = share else { continue };
            let left = place as f64 - 0.4 + width * index as f64;
            // A share of 0 is a thin line: it is known.
            let top = share.max(0.015);
            let corners = [(left + width * 0.08, 0.0), (left + width * 0.92, top)];
            chart.draw_series([Rectangle::new(corners, color.filled())])?;
        }
    }
    Ok(())
}

type Chart<'a, 'b, X, Y> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<X, Y>>;

/// Draws a curve with its marks, and a line from the least to the most of several runs.
fn draw_curve<'b, X, Y>(
    chart: &mut Chart<'_, 'b, X, Y>,
    look: usize,
    values: &[Option<Spread>],
) -> Result<()>
where
    X: Ranged<ValueType = f64>,
    Y: Ranged<ValueType = f64>,
{
    let color = color_of(look).in_chart();
    let known = || {
        let values = values.iter().enumerate();
        values.filter_map(|(place, value)| Some((place as f64, (*value)?)))
    };
    let points: Vec<(f64, f64)> = known()
        .map(|(place, spread)| (place, spread.median))
        .collect();
    chart.draw_series([PathElement::new(points, color.stroke_width(2))])?;
    for (place, spread) in known() {
        if spread.least < spread.most {
            let ends = [(place, spread.least), (place, spread.most)];
            chart.draw_series([PathElement::new(ends, color.stroke_width(1))])?;
        }
        let at = (place, spread.median);
        match look % 3 {
            0 => chart
                .draw_series([Circle::new(at, 4, color.filled())])
                .map(drop)?,
            1 => chart
                .draw_series([TriangleMarker::new(at, 5, color.filled())])
                .map(drop)?,
            _ => chart
                .draw_series([Cross::new(at, 4, color.stroke_width(2))])
                .map(drop)?,
        }
    }
    Ok(())
}
