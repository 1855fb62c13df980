# Every target does the set-up it needs; see `make help`.

CARGO  ?= cargo
PREFIX ?= /usr/local
# make bench QUICK=1: a few minutes, to see that the harness works; its numbers are not for quoting.
QUICK  ?=
SOAK_SECONDS ?= 1800
SOAK_CASES ?= 1000000
# For each target of make fuzz.
FUZZ_SECONDS ?= 60
# The longest that a guest of make lab may take.
LAB_SECONDS ?= 1500
# The longest that the container of make systemd may take.
SYSTEMD_SECONDS ?= 900

TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
BIN    := $(TARGET)/release/jericho
# What `jericho run` makes programs load.
LIB    := $(TARGET)/release/libjericho_preload.so
# What opens packet sockets for users without CAP_NET_RAW, and the group of these users.
HELPER := $(TARGET)/release/jericho-packet
NET_GROUP ?= jericho-net
# Where mount(8) and umount(8) look for the helpers of a type.
SBINDIR ?= /sbin
# Where systemd looks for units of local software when PREFIX is /usr/local.
UNITDIR ?= $(PREFIX)/lib/systemd/system

.PHONY: help build demo test model model-mutants crash-mutants programs lab systemd fuzz conformance soak bench compare-syncs compare-failures compare-creates compare-volumes compare-removals compare-generators compare-remote mount-times acceptance results traces man install uninstall clean setup-demo setup-test setup-programs setup-bench setup-lab setup-systemd setup-traces setup-syncs setup-remote setup-conformance setup-report report-pages

help:
	@echo 'make demo      a volume on an ordinary file, real programs on it, every byte checked'
	@echo 'make test      formatting, lints, all tests, real programs; what .ci/run does'
	@echo 'make model     the protocol of shared memory under a model checker (part of make test; SWITCHES=4: 10 times deeper)'
	@echo 'make model-mutants  makes faults in a copy of that protocol, and expects make model to find them (7 minutes)'
	@echo 'make crash-mutants  makes faults in a copy of the filesystem, and expects the test of power cuts to find them (10 minutes)'
	@echo 'make programs  larger programs: Java and PostgreSQL (installs about 400 MB of packages; 2 minutes)'
	@echo 'make lab       machines with NUMA nodes, emulated: are pages, threads, accesses and frames where they should be? (MACHINE=opteron: one of scripts/machines; ONLY=name; all machines take an hour)'
	@echo 'make systemd   the systemd units, run by a systemd in a container: crashes, stops, restarts (as root or with sudo; half a minute; ONLY=name)'
	@echo 'make fuzz      damaged volumes, hostile programs, strange kernels: libFuzzer for FUZZ_SECONDS=$(FUZZ_SECONDS) each (ONLY=name)'
	@echo 'make conformance  pjdfstest on the mount by both transports; fsx there and under jericho run: a million operations, every byte compared; QEMU'"'"'s block tests on jericho nbd'
	@echo 'make soak      kills programs in their writes for SOAK_SECONDS=$(SOAK_SECONDS) while others verify; then SOAK_CASES=$(SOAK_CASES) power cuts; then every failure of a device; then 100 rounds of filling and emptying 1 GiB; then a mount of 10^7 inodes'
	@echo 'make bench     ratios against libfuse passthrough and fio (QUICK=1: 10 minutes instead of 90)'
	@echo 'make compare-syncs  durable writes, SQLite, PostgreSQL and RocksDB on a volume, on ext4 and on XFS (as root; 40 minutes; SYNCS_ARGS="--rounds 1")'
	@echo 'make compare-failures  syncs on one device while another one fails, hangs or is slow (5 minutes)'
	@echo 'make compare-creates   creates of two threads in two slices against those of one thread (2 minutes)'
	@echo 'make compare-volumes   syncs beside 10^6 inodes and 1 GiB of dirty pages against those on an empty volume (10 minutes, 12 GiB of memory)'
	@echo 'make compare-removals  creates beside the removal of a file with 10^5 extents, and the memory of 10^6 creates (1 minute)'
	@echo 'make compare-generators   operations a second of jericho bench zmio and fsmark against those of fio and fs_mark with the same sizes (4 minutes)'
	@echo 'make mount-times       bytes and seconds of a mount after a kill, with 10^3 and 10^6 inodes and with a full journal'
	@echo 'make acceptance        compare-creates, -removals, -volumes, -failures, mount-times and compare-syncs, one after the other (as root; one hour, on a machine without other load)'
	@echo 'make compare-remote    a device of another host by Jericho, NBD and AoE; links that fail and links with faults (25 minutes; QUICK=1: 7 minutes; REMOTE_ARGS="--tables main")'
	@echo 'make results   the last run of the benchmark into README.md and docs/performance'
	@echo 'make traces    records page accesses of real programs, and compares kinds of replacement on them (as root; 10 minutes)'
	@echo 'make report-pages      pages of jericho report in headless Chromium: screenshots, contrast, width on a phone, print (installs Chromium, 300 MB; half a minute)'
	@echo 'make build     the release binary $(BIN) and the library that programs load, beside it'
	@echo 'make man       manual pages and shell completions in $(TARGET)/man and $(TARGET)/completions'
	@echo 'make install   after make man, as root: PREFIX=$(PREFIX) (DESTDIR is honoured); NET_GROUP=$(NET_GROUP) may use devices of other hosts'
	@echo 'make uninstall what install put there'
	@echo 'make clean     removes what was built'

setup-demo setup-test setup-programs setup-bench setup-lab setup-systemd setup-traces setup-syncs setup-remote setup-conformance setup-report: setup-%:
	@scripts/setup $*

build:
	$(CARGO) build --release -p jericho-cli -p jericho-preload

demo: setup-demo
	@echo 'Building jericho ...'
	@$(CARGO) build --release --quiet -p jericho-cli -p jericho-preload
	@scripts/demo $(BIN)

# The parts of the test suite `programs` that run once more over the FUSE ring. Their programs read and write through the mount.
OVER_RING := dead:: coherent:: copies:: interrupted:: overlapping:: halves:: fio:: sqlite:: git:: idle:: crash:: full:: rehome:: hostile:: small_files:: stopped:: syncs::

# The parts and tests of the test suite `commands` that have no mount of a volume, and so no FUSE ring, and those that measure.
WITHOUT_RING := --skip bench:: --skip bench_generators:: --skip bench_paths:: --skip report:: --skip probe:: --skip predict:: --skip attach:: --skip attach_faults:: --skip wire:: --skip nbd_clients:: --skip xdp --skip another_host_copies

# Devices that fail as tests order. Release builds have none: the feature does not compile there.
FAULTS := --features jericho-cli/faults

# Everything after the build is of the whole workspace: with other packages, cargo would choose other features, and build most crates again.
test: setup-test
	codespell
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets $(FAULTS) -- -D warnings
	$(CARGO) clippy -p jericho-storage --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --quiet --workspace --no-deps --document-private-items
	$(CARGO) build --workspace $(FAULTS)
	scripts/with-ring off $(CARGO) test --workspace $(FAULTS) --no-fail-fast
	scripts/with-ring on $(CARGO) test --workspace $(FAULTS) --no-fail-fast --test commands --test posix -- $(WITHOUT_RING)
	scripts/with-ring on $(CARGO) test --workspace $(FAULTS) --test programs -- $(OVER_RING)
	@CARGO='$(CARGO)' LAB_BUILD='--workspace $(FAULTS)' scripts/lab-test $(TARGET)/lab $(TARGET)/debug/jericho
	@$(MAKE) --no-print-directory model

# Uses a target directory of its own: the flag changes the build of every crate, so in a shared one each build would undo the other.
SWITCHES ?= 3
MODEL    := RUSTFLAGS='$(RUSTFLAGS) --cfg loom' LOOM_MAX_PREEMPTIONS=$(SWITCHES) $(CARGO)
model:
	$(MODEL) clippy --target-dir $(TARGET)/model -p jericho-shm --release --all-targets -- -D warnings
	$(MODEL) test --target-dir $(TARGET)/model -p jericho-shm --release --lib model::

model-mutants:
	@scripts/model-mutants "$(ONLY)"

crash-mutants:
	@scripts/crash-mutants "$(ONLY)"

programs: setup-programs
	$(CARGO) build --workspace $(FAULTS)
	$(CARGO) test -p jericho-cli $(FAULTS) --test programs -- --ignored large::

# Machines of make lab: all files in scripts/machines.
MACHINE ?= $(notdir $(wildcard scripts/machines/*))

lab: setup-lab
	$(CARGO) build --release -p jericho-cli -p jericho-preload
	@for machine in $(MACHINE); do \
	    CARGO='$(CARGO)' LAB_SECONDS=$(LAB_SECONDS) scripts/lab $$machine $(TARGET)/lab $(BIN) $(ONLY) || exit; \
	done

# Installed as by a user, but below the build directory. The container sees it as /usr/local.
systemd: setup-systemd man
	@rm -rf $(TARGET)/systemd/installed
	@$(MAKE) --no-print-directory --silent install DESTDIR=$(abspath $(TARGET))/systemd/installed PREFIX=/usr/local UNITDIR=/usr/local/lib/systemd/system
	@CARGO='$(CARGO)' SYSTEMD_SECONDS=$(SYSTEMD_SECONDS) scripts/systemd $(TARGET)/systemd $(ONLY)

fuzz: setup-demo
	@CARGO='$(CARGO)' scripts/fuzz $(abspath $(TARGET)) $(FUZZ_SECONDS) $(ONLY)

conformance: setup-test setup-conformance
	$(CARGO) build --release -p jericho-cli -p jericho-preload
	JERICHO_FSX_OPERATIONS=100000 JERICHO_FSX_SEEDS=10 scripts/with-ring off $(CARGO) test --release -p jericho-cli --test commands -- fsx:: pjdfstest::
	JERICHO_FSX_OPERATIONS=100000 JERICHO_FSX_SEEDS=10 scripts/with-ring on $(CARGO) test --release -p jericho-cli --test commands -- fsx:: pjdfstest::
	scripts/iotests $(TARGET)/release/jericho $(TARGET)/iotests

soak: setup-test
	$(CARGO) build --release --workspace
	JERICHO_SOAK_SECONDS=$(SOAK_SECONDS) $(CARGO) test --release -p jericho-cli --test programs -- --nocapture killed:: crowd::
	JERICHO_SOAK_SECONDS=60 $(CARGO) test --release -p jericho-cli --test commands -- --nocapture another_user_attacks
	JERICHO_CRASH_CASES=$(SOAK_CASES) $(CARGO) test --release -p jericho-fs --test crash -- --nocapture
	JERICHO_FAILING_CASES=all $(CARGO) test --release -p jericho-fs --test failing -- --nocapture
	JERICHO_FULL_MIB=1024 $(CARGO) test --release -p jericho-fs --test full -- --nocapture
	JERICHO_MOUNT_FILES=10000000 $(CARGO) test --release -p jericho-fs --test numbers -- --nocapture a_mount

bench: setup-bench
	$(CARGO) build --release -p jericho-cli -p jericho-preload -p jericho-bench
	scripts/with-ring also $(TARGET)/release/jericho-bench --jericho $(BIN) --passthrough "$$(scripts/passthrough-hp)" --out $(TARGET)/bench $(if $(QUICK),--quick) $(BENCH_ARGS)

compare-generators: setup-bench
	$(CARGO) build --release -p jericho-cli
	scripts/compare-generators $(BIN) $(TARGET)/generators $(GENERATORS_ARGS)

# Beside the times it counts flushes and bytes, which hold on a noisy machine too.
compare-syncs: setup-syncs
	$(CARGO) build --release -p jericho-cli -p jericho-preload
	scripts/with-ring also scripts/compare-syncs $(BIN) $(TARGET)/syncs $(SYNCS_ARGS)

# A debug build: release builds have no faults to order. All times of a ratio are of the same build.
compare-failures: setup-demo
	$(CARGO) build -p jericho-cli $(FAULTS)
	@rm -rf $(TARGET)/failures
	scripts/compare-failures $(TARGET)/debug/jericho $(TARGET)/failures $(FAILURES_ARGS)

compare-creates compare-volumes compare-removals: compare-%:
	@mkdir -p $(TARGET)/compared
	$(CARGO) run --release -p jericho-fs --example $* -- $(TARGET)/compared

# Hosts are network namespaces. Needs no mount.
compare-remote: setup-remote
	$(CARGO) build --release -p jericho-cli -p jericho-bench
	$(TARGET)/release/jericho-compare-remote --jericho $(BIN) --out $(TARGET)/remote $(if $(QUICK),--quick) $(REMOTE_ARGS)

mount-times:
	JERICHO_MOUNT_FILES=1000000 $(CARGO) test --release -p jericho-fs --test numbers -- --nocapture a_mount

# One after the other, because they would disturb each other.
acceptance:
	@$(MAKE) --no-print-directory compare-creates
	@$(MAKE) --no-print-directory compare-removals
	@$(MAKE) --no-print-directory compare-volumes
	@$(MAKE) --no-print-directory compare-failures
	@$(MAKE) --no-print-directory mount-times
	@$(MAKE) --no-print-directory compare-syncs

results:
	$(CARGO) run --release -p jericho-bench --bin jericho-results -- $(TARGET)/bench/bench.json

# Misses of each kind of replacement. The records stay in the build directory for a second look.
traces: setup-traces
	$(CARGO) build --release -p jericho-cache --example replacement
	scripts/traces $(TARGET)/release/examples/replacement $(TARGET)/traces
	$(TARGET)/release/examples/replacement $(TARGET)/traces/*.trace

# Not part of make test, because of the size of the browser.
report-pages: setup-report
	$(CARGO) build --release -p jericho-cli
	scripts/report-pages $(BIN) $(TARGET)/report-pages

man: build
	@mkdir -p $(TARGET)/man $(TARGET)/completions
	$(BIN) man $(TARGET)/man
	@for shell in bash zsh fish; do $(BIN) completions $$shell > $(TARGET)/completions/jericho.$$shell; done

# As root there is often no cargo: what `make man` built as an ordinary user is installed as it is.
install:
	@[ -x $(BIN) ] && [ -x $(HELPER) ] && [ -e $(LIB) ] && [ -d $(TARGET)/man ] || $(MAKE) man
	install -D -m 755 $(BIN) $(DESTDIR)$(PREFIX)/bin/jericho
	install -D -m 644 $(LIB) $(DESTDIR)$(PREFIX)/lib/jericho/libjericho_preload.so
	@scripts/install-packet $(HELPER) $(DESTDIR)$(PREFIX)/libexec/jericho/jericho-packet $(PREFIX)/libexec/jericho/jericho-packet $(NET_GROUP)
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 644 $(TARGET)/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1/
	install -D -m 644 $(TARGET)/completions/jericho.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/jericho
	install -D -m 644 $(TARGET)/completions/jericho.zsh $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_jericho
	install -D -m 644 $(TARGET)/completions/jericho.fish $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/jericho.fish
	install -d $(DESTDIR)$(SBINDIR)
	ln -sf $(PREFIX)/bin/jericho $(DESTDIR)$(SBINDIR)/mount.fuse.jericho
	ln -sf $(PREFIX)/bin/jericho $(DESTDIR)$(SBINDIR)/umount.fuse.jericho
	install -d $(DESTDIR)$(UNITDIR)
	for unit in jericho@ jericho-serve@; do \
	  sed 's|/usr/local/bin/|$(PREFIX)/bin/|' packaging/$$unit.service > $(DESTDIR)$(UNITDIR)/$$unit.service || exit; done

uninstall:
	rm -f $(DESTDIR)$(SBINDIR)/mount.fuse.jericho $(DESTDIR)$(SBINDIR)/umount.fuse.jericho
	rm -f $(DESTDIR)$(PREFIX)/bin/jericho $(DESTDIR)$(PREFIX)/share/man/man1/jericho*.1 \
	  $(DESTDIR)$(PREFIX)/share/bash-completion/completions/jericho \
	  $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_jericho \
	  $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/jericho.fish \
	  $(DESTDIR)$(PREFIX)/libexec/jericho/jericho-packet \
	  $(DESTDIR)$(PREFIX)/lib/jericho/libjericho_preload.so $(DESTDIR)$(UNITDIR)/jericho@.service $(DESTDIR)$(UNITDIR)/jericho-serve@.service
	-rmdir $(DESTDIR)$(PREFIX)/lib/jericho $(DESTDIR)$(PREFIX)/libexec/jericho

clean:
	$(CARGO) clean
