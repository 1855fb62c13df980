//! Tests of whole pages: their structure, their sentences, and pages of bad or large input.
#![forbid(unsafe_code)]

use jericho_report::{Cell, Grid, Probe, Results, compare, comparison, report};

/// What a line of the tests varies.
#[derive(Clone)]
struct Line {
    workload: &'static str,
    variant: &'static str,
    placement: String,
    threads: u32,
    rate: f64,
    local: &'static str,
    cpu: String,
    nodes: u32,
    topology: &'static str,
    target: String,
    data_bytes: u64,
    cpio: bool,
}

fn line() -> Line {
    Line {
        workload: "scan",
        variant: "randread",
        placement: "best".into(),
        threads: 1,
        rate: 1e9,
        local: "1.0",
        cpu: "Example CPU".into(),
        nodes: 2,
        topology: "sysfs",
        target: "/mnt/data".into(),
        data_bytes: 1 << 28,
        cpio: true,
    }
}

impl Line {
    fn text(&self) -> String {
        let cycles = r#"{"user":10.0,"system":20.0,"idle":30.0,"io_wait":4.0,"irq":1.0,"soft_irq":2.0,"steal":0.0}"#;
        let cpio = if self.cpio { cycles } else { "null" };
        // Names of tests may have quotation marks.
        let quoted =
            |text: &str| format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""));
        format!(
            r#"{{"format":1,"workload":"{}","variant":"{}","targets":[{}],"placement":{},"threads":{},"with_mstress":false,"seconds":1.0,"data_bytes":{},"as_paper":false,"seed":1,"throughput_bytes_per_s":{:?},"iops":1000.0,"throughput_bytes_per_s_by_node":{{"0":1e8}},"latency_ns":{{"p50":10000,"p90":20000,"p99":50000,"p99.9":90000,"p99.99":400000}},"local_share":{},"cpio":{cpio},"cycles_per_moved_sector":{cycles},"sampled":["user"],"machine":{{"cpu_model":{},"cpus":8,"nodes":{},"topology":"{}","kernel":"6.18","tsc_hz":2e9,"jericho":"0.1.0"}},"notes":["A note."]}}"#,
            self.workload,
            self.variant,
            quoted(&self.target),
            quoted(&self.placement),
            self.threads,
            self.data_bytes,
            self.rate,
            self.local,
            quoted(&self.cpu),
            self.nodes,
            self.topology,
        )
    }
}

fn results(lines: &[Line]) -> Results {
    let mut results = Results::default();
    results.begin_file("results.jsonl");
    for (index, line) in lines.iter().enumerate() {
        results
            .add_line(index + 1, line.text().as_bytes())
            .expect("a result");
    }
    results
}

fn page(lines: &[Line]) -> String {
    report(&results(lines), None, &[]).expect("a page")
}

/// Two placements at three numbers of threads.
fn two_placements() -> Vec<Line> {
    let of = |placement: &str, threads: u32, rate: f64, local: &'static str| Line {
        placement: placement.into(),
        threads,
        rate,
        local,
        ..line()
    };
    [1, 2, 4]
        .into_iter()
        .flat_map(|threads| {
            let rate = f64::from(threads) * 1e9;
            [
                of("worst", threads, rate / 2.0, "0.0"),
                of("best", threads, rate, "1.0"),
            ]
        })
        .collect()
}

/// Returns the headings, and the labels of figures, in their order.
fn outline(html: &str) -> Vec<String> {
    let mut parts = Vec::new();
    for piece in html.split('<').skip(1) {
        let (tag, text) = piece.split_once('>').unwrap_or((piece, ""));
        let name = tag.split(' ').next().unwrap_or_default();
        match name {
            "h1" | "h2" | "h3" | "h4" => parts.push(format!("{name} {text}")),
            "figure" => {
                let label = tag
                    .split_once("aria-label=\"")
                    .map(|(_, rest)| rest.trim_end_matches('"'));
                parts.push(format!("figure {}", label.unwrap_or_default()));
            }
            _ => {}
        }
    }
    parts
}

#[test]
fn the_page_has_its_parts_in_order() {
    let html = page(&two_placements());
    let outline = outline(&html);
    let expected = [
        "h1 Storage I/O and placement",
        "h2 The machine",
        "h3 Peaks",
        "h3 scan",
        "h4 scan randread",
        "figure Throughput of randread over threads",
        "figure Latency percentiles of randread",
        "figure Cycles per I/O (CPIO) of randread",
        "h2 The papers' ratios",
    ];
    assert_eq!(outline[..expected.len()], expected);
    let last: Vec<&str> = outline.iter().rev().take(2).map(String::as_str).collect();
    assert_eq!(
        last,
        ["h2 How to read this page", "h3 Why figures have no value"]
    );
}

#[test]
fn each_result_has_its_conditions_and_figures() {
    let html = page(&two_placements());
    for part in [
        "Example CPU",
        "8, 2 (sysfs)",
        "6.18",
        "On /mnt/data. Data: 256 MiB. 6 runs, 1.0 s each; seed 1.",
        "<b>4.00 GB/s</b><span class=\"of\">4 threads, 100 % local",
        "<b>2.00 GB/s</b><span class=\"of\">4 threads, 0 % local",
        "A note.",
        "user*",
        "* sampled by the kernel at each tick",
        // Best over worst at the most threads of both.
        "<b>2.00\u{d7}</b>",
        "best over worst, 4 threads, 1 run of each",
    ] {
        assert!(html.contains(part), "{part}\n{html}");
    }
}

#[test]
fn the_page_says_that_worst_and_bad_are_one_placement_under_two_names() {
    let html = page(&two_placements());
    let sentence = "worst and bad: each thread is on a node far from these.";
    assert!(html.contains(sentence), "{html}");
    assert!(!html.contains("far from the device, too"));
}

#[test]
fn the_page_needs_nothing_from_elsewhere() {
    let html = page(&two_placements());
    let without_names = html.replace("http://www.w3.org/2000/svg", "");
    for word in [
        "<script", "http:", "https:", "src=", "<link", "url(", "@import",
    ] {
        assert!(!without_names.contains(word), "{word}");
    }
    assert!(html.starts_with("<!DOCTYPE html>"));
    assert_eq!(
        html,
        page(&two_placements()),
        "the same results make the same page"
    );
}

#[test]
fn names_cannot_change_the_page() {
    let evil = "</td><script>alert(\"1\")</script>&amp;";
    let mut lines = two_placements();
    lines[0].placement = evil.into();
    lines[1].target = evil.into();
    lines[2].cpu = evil.into();
    let results = results(&lines);
    let html = report(&results, None, &[]).unwrap();
    assert!(!html.contains("<script"), "{html}");
    assert!(html.contains("&lt;script&gt;"));
    let other = comparison(&compare(&results, &results), [&results, &results]).unwrap();
    assert!(!other.contains("<script") && other.contains("&lt;script&gt;"));
}

#[test]
fn machines_that_cannot_show_locality_say_so_and_are_apart() {
    let mut lines = two_placements();
    lines[0].nodes = 1;
    lines[1].topology = "virtual:2";
    lines[2].cpu = "QEMU TCG CPU version 2.5+".into();
    let html = page(&lines);
    for part in [
        "effects of locality cannot appear on it",
        "an effect of placement on speed cannot appear",
        "its times mean nothing",
        "Machine 4: Example CPU",
        "% of the largest",
    ] {
        assert!(html.contains(part), "{part}");
    }
    let charts = outline(&html)
        .iter()
        .filter(|part| part.contains("figure Throughput"))
        .count();
    assert_eq!(charts, 4, "a machine has a curve of its own");
    let emulated = page(&lines[2..3]);
    assert!(
        !emulated.contains("GB/s</text>")
            && !emulated.contains("<figure role=\"group\" aria-label=\"Latency")
    );
    assert!(
        !emulated.contains("MB/s") && emulated.contains("100 %"),
        "no rate of an emulated machine"
    );
}

#[test]
fn a_run_that_the_kernel_did_not_confirm_says_so() {
    let text = line()
        .text()
        .replacen('{', "{\"confirmed\":false,\"engine\":[\"page cache\"],", 1);
    let mut results = Results::default();
    results.begin_file("results.jsonl");
    results.add_line(1, text.as_bytes()).unwrap();
    let html = report(&results, None, &[]).unwrap();
    assert!(
        html.contains("1 run: the kernel did not confirm")
            && html.contains("/mnt/data, page cache"),
        "{html}"
    );
    assert!(!page(&[line()]).contains("did not confirm"));
}

#[test]
fn the_page_shows_the_conditions_of_targets_and_of_the_machine() {
    let with = r#""targets_on":[{"filesystem":"fuse.jericho","transport":"ring","cache_bytes":67108864,"build":"0123456789abcdef"}],"path":"mount","disks":[{"name":"vda","model":"Example <disk>","size_bytes":1073741824,"rotational":false}],"confirmed":true,"confirmed_for":["threads"],"machine":{"memory_bytes":17179869184,"hypervisor":"KVMKVMKVM","build":"fedcba9876543210","#;
    let page_of = |text: &str| {
        let mut results = Results::default();
        results.begin_file("results.jsonl");
        results.add_line(1, text.as_bytes()).unwrap();
        report(&results, None, &[]).unwrap()
    };
    let text = line().text().replace("\"machine\":{", with);
    let html = page_of(&text);
    for part in [
        "/mnt/data (Jericho mount, transport ring, cache 64.0 MiB, disk vda)",
        "Disks: vda: Example &lt;disk&gt;, 1.00 GiB, not rotating.",
        "Build of the daemon: 0123456789ab.",
        "The kernel confirmed the places of threads.",
        "KVMKVMKVM: the machine is a guest",
        "16.0 GiB",
        "0.1.0, build fedcba987654",
    ] {
        assert!(html.contains(part), "{part}\n{html}");
    }
    let emulated = page_of(&text.replace("KVMKVMKVM", "TCGTCGTCGTCG"));
    assert!(emulated.contains("they say nothing about real machines"));
    let fake = page_of(&text.replace("\"memory_bytes\"", "\"fake_nodes\":true,\"memory_bytes\""));
    assert!(fake.contains("its times say nothing about locality") && fake.contains("numa=fake"));
}

#[test]
fn a_cached_run_beside_runs_on_devices_has_its_cycles_in_a_chart_of_its_own() {
    let figures = |cpio: [bool; 2]| -> Vec<String> {
        let lines = [("best", cpio[0]), ("worst", cpio[1])].map(|(placement, cpio)| Line {
            placement: placement.into(),
            cpio,
            ..line()
        });
        let html = page(&lines);
        let parts = outline(&html).into_iter();
        parts
            .filter(|part| part.starts_with("figure Cycles"))
            .collect()
    };
    let (devices, programs) = (
        "figure Cycles per I/O (CPIO) of randread",
        "figure Cycles for each 512 bytes moved of randread",
    );
    assert_eq!(figures([true, true]), [devices]);
    assert_eq!(figures([true, false]), [devices, programs]);
    assert_eq!(figures([false, false]), [programs]);
}

#[test]
fn a_run_that_moved_nothing_or_lacks_figures_has_a_page() {
    let mut lines = vec![Line {
        rate: 0.0,
        local: "null",
        cpio: false,
        ..line()
    }];
    let html = page(&lines);
    assert!(html.contains("Cycles for each 512 bytes moved") && !html.contains("NaN"));
    assert!(html.contains("local accesses: unknown"));
    lines.push(Line {
        threads: 999_999,
        rate: 1e15,
        ..line()
    });
    assert!(!page(&lines).contains("NaN"));
}

#[test]
fn a_hundred_thousand_runs_make_a_page_of_bounded_size() {
    let repeated: Vec<Line> = (0..100_000)
        .map(|index| Line {
            threads: index % 3 + 1,
            rate: 1e9 + f64::from(index),
            ..line()
        })
        .collect();
    let html = page(&repeated);
    assert!(html.len() < 4 << 20, "{}", html.len());
    assert!(html.contains("further runs are not listed"));
    // All conditions differ.
    let mut apart = repeated[..20_000].to_vec();
    for (index, line) in apart.iter_mut().enumerate() {
        line.data_bytes += index as u64;
        line.placement = format!("placement {index}");
    }
    let html = page(&apart);
    assert!(html.len() < 4 << 20, "{}", html.len());
    assert!(html.contains("further sets of conditions are left out"));
}

#[test]
fn the_heat_map_is_with_its_machine_or_says_that_it_is_of_another_one() {
    let cell = |text: &str, is_dark| {
        Some(Cell {
            text: text.into(),
            color: [8, 69, 148],
            is_dark,
        })
    };
    let mut probe = Probe {
        name: "The probe is that of probe.json.".into(),
        digest: "0123456789abcdef".into(),
        cpu_model: "Example CPU".into(),
        nodes: 2,
        head: vec!["A machine & its <nodes>".into()],
        grids: vec![Grid {
            title: "Latency, ns".into(),
            cells: vec![
                vec![cell("90", false), cell("150", true)],
                vec![None, cell("91", false)],
            ],
        }],
    };
    let results = results(&two_placements());
    let html = report(&results, Some(&probe), &[]).unwrap();
    for part in [
        "Bandwidth and latency between its nodes",
        "A machine &amp; its &lt;nodes&gt;",
        "<td class=\"dark\" style=\"background:rgb(8,69,148)\">150</td>",
        "<td class=\"none\">",
    ] {
        assert!(html.contains(part), "{part}");
    }
    assert!(!html.contains("The probe is of another machine"));
    // The lines do not tell the digest of their nodes.
    assert!(html.contains("The probe is that of probe.json."));
    assert!(html.contains("the probe may be of another machine"));
    for (digest, is_own) in [("0123456789abcdef", true), ("fedcba9876543210", false)] {
        let field = format!("\"machine\":{{\"topology_digest\":\"{digest}\",");
        let text = line().text().replace("\"machine\":{", &field);
        let mut results = Results::default();
        results.begin_file("results.jsonl");
        results.add_line(1, text.as_bytes()).unwrap();
        let html = report(&results, Some(&probe), &[]).unwrap();
        let own = html.contains("Bandwidth and latency between its nodes");
        let other = html.contains("The probe is of another machine");
        assert_eq!((own, other), (is_own, !is_own), "{digest}");
        assert!(html.contains("The probe is that of probe.json."));
        assert!(!html.contains("the probe may be of another machine"));
    }
    probe.nodes = 4;
    assert!(
        report(&results, Some(&probe), &[])
            .unwrap()
            .contains("The probe is of another machine")
    );
}

#[test]
fn a_comparison_shows_verdicts_intervals_and_conditions() {
    let runs = |rates: &[f64], threads: u32| -> Vec<Line> {
        rates
            .iter()
            .map(|rate| Line {
                rate: *rate,
                threads,
                ..line()
            })
            .collect()
    };
    let a = [runs(&[1.0e9, 1.1e9, 0.9e9, 1.05e9], 1), runs(&[1e9], 2)].concat();
    let b = [
        runs(&[2.0e9, 2.1e9, 1.9e9, 2.05e9], 1),
        runs(&[9e9], 2),
        runs(&[1e9], 8),
    ]
    .concat();
    let (a, b) = (results(&a), results(&b));
    let html = comparison(&compare(&a, &b), [&a, &b]).unwrap();
    for part in [
        "2 comparisons: 1 faster, 0 slower, 1 no difference (1 with too few runs to tell; it takes 4 on each side)",
        "(1.727 to 2.333)",
        "faster</span>",
        "no difference: too few runs to tell; it takes 4 on each side",
        "scan randread, best, 8 threads: only in the second file",
        "Hodges and Lehmann",
    ] {
        assert!(html.contains(part), "{part}\n{html}");
    }
    assert_eq!(
        outline(&html)
            .iter()
            .filter(|part| part.starts_with("figure"))
            .count(),
        1
    );
    let emulated = results(&[Line {
        cpu: "QEMU TCG CPU".into(),
        ..line()
    }]);
    let html = comparison(&compare(&emulated, &emulated), [&emulated, &emulated]).unwrap();
    assert!(
        html.contains(">emulated<") && !html.contains("GB/s"),
        "{html}"
    );
    // Nothing in common is a page, too.
    let apart = results(&[Line {
        workload: "dd",
        ..line()
    }]);
    let other = comparison(&compare(&a, &apart), [&a, &apart]).unwrap();
    assert!(other.contains("no run under the same conditions"));
}

#[test]
fn a_comparison_says_how_many_intervals_and_machines_it_leaves_out() {
    let of = |count: u32| {
        let runs = (1..=count).flat_map(|threads| {
            [1e9, 1.01e9, 0.99e9, 1.02e9].map(|rate| Line {
                threads,
                rate,
                ..line()
            })
        });
        results(&runs.collect::<Vec<_>>())
    };
    let page = |runs: &Results| comparison(&compare(runs, runs), [runs, runs]).unwrap();
    assert!(!page(&of(60)).contains("further intervals"));
    assert!(page(&of(63)).contains("3 further intervals are not listed."));
    let machines: Vec<Line> = (0..14)
        .map(|number| Line {
            cpu: format!("CPU {number}"),
            ..line()
        })
        .collect();
    assert!(page(&results(&machines)).contains("2 further machines are not listed."));
}
