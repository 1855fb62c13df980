//! Reads the tables of a page in `docs/formats`.

/// (offset, size, field)
pub type Fields = Vec<(usize, usize, String)>;

/// Returns the fields of a struct without padding, in order.
#[macro_export]
macro_rules! fields {
    ($type:ident: $($field:ident)*) => {{
        // Fails to compile when a field is missing here.
        let _ = |value: $type| { let $type { $($field: _),* } = value; };
        let offsets = [$((std::mem::offset_of!($type, $field), stringify!($field))),*];
        let ends = offsets.iter().skip(1).map(|o| o.0).chain([size_of::<$type>()]);
        offsets.iter().zip(ends).map(|(o, end)| (o.0, end - o.0, o.1.to_owned())).collect::<$crate::page::Fields>()
    }};
}

/// Returns the rows of the first table under a heading, without its two header lines.
pub fn table(page: &str, heading: &str) -> Vec<Vec<String>> {
    let is_heading = |line: &&str| line.trim_start_matches('#').trim() == heading;
    page.lines()
        .skip_while(|line| !is_heading(line))
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        .skip(2)
        .map(|line| {
            line.trim_matches('|')
                .split('|')
                .map(|cell| cell.trim().to_owned())
                .collect()
        })
        .collect()
}

/// Returns the fields in the table under a heading.
pub fn documented(page: &str, heading: &str) -> Fields {
    let number = |cell: &str| cell.parse().unwrap_or_else(|_| panic!("{heading}: {cell}"));
    table(page, heading)
        .iter()
        .map(|r| (number(&r[0]), number(&r[1]), r[2].clone()))
        .collect()
}
