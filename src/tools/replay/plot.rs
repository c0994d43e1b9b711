//! Curves of hits by size, as an SVG that needs nothing else.

use std::fmt::Write as _;

/// A line of the plot: blocks that have room, and hits in a hundred.
#[derive(Debug, Clone)]
pub struct Curve {
    pub name: String,
    pub points: Vec<(usize, f64)>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 50.0;
const COLOURS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000",
];

/// The plot, with sizes on a logarithmic axis. `title` and names may have any signs.
pub fn svg(title: &str, curves: &[Curve]) -> String {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let log = |blocks: usize| (blocks.max(1) as f64).ln();
    let first = points()
        .map(|(blocks, _)| log(*blocks))
        .fold(f64::INFINITY, f64::min);
    let last = points().map(|(blocks, _)| log(*blocks)).fold(first, f64::max);
    let most = points().map(|(_, percent)| *percent).fold(1.0, f64::max);
    let x = |blocks: usize| {
        LEFT + (WIDTH - LEFT - RIGHT) * (log(blocks) - first) / (last - first).max(f64::MIN_POSITIVE)
    };
    let y = |percent: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * percent / most;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\" role=\"img\">\n<title>{0}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"18\">{0}</text>\n",
        escaped(title)
    );
    // Writing to a string can't fail.
    for step in 0..=4 {
        let percent = most * f64::from(step) / 4.0;
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {0:.1}H{1}\" stroke=\"#ddd\"/><text x=\"{2}\" y=\"{0:.1}\" text-anchor=\"end\">{percent:.0} %</text>",
            y(percent),
            WIDTH - RIGHT,
            LEFT - 6.0
        );
    }
    for (blocks, _) in curves.first().into_iter().flat_map(|curve| &curve.points) {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{blocks}</text>",
            x(*blocks),
            HEIGHT - BOTTOM + 18.0
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">blocks that have room</text>",
        f64::midpoint(LEFT, WIDTH - RIGHT),
        HEIGHT - 10.0
    );
    for (index, curve) in curves.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let line: Vec<String> = curve
            .points
            .iter()
            .map(|(blocks, percent)| format!("{:.1},{:.1}", x(*blocks), y(*percent)))
            .collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\
             <text x=\"{}\" y=\"{}\" fill=\"{colour}\">{}</text>",
            line.join(" "),
            WIDTH - RIGHT + 8.0,
            TOP + 16.0 * (index as f64 + 1.0),
            escaped(&curve.name)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
