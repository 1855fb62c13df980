//! What happens when the library is loaded, and when the program ends.

use crate::{errno, real, report};

// The C library calls what stands in these sections, once, before main and after the program's own
// exit handlers.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

/// Not before other libraries' constructors, necessarily: hooks work without it.
extern "C" fn start() {
    real::find_all();
    errno::kept(jericho_client::fd::prepare);
    report::prepare();
}

/// Not after all other destructors: what those still do works, but is not in the report.
extern "C" fn end() {
    report::write();
}
