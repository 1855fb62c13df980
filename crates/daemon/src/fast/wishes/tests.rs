use std::sync::mpsc;
use std::time::Duration;

use jericho_shm::{Area, Call, SlotInfo};

use super::*;
use crate::fast::client_table::Client;
use crate::fast::grants::tests::Bed;
use crate::fast::wishers::{ENTRIES, Wishers};
use crate::simulated::asker;
use crate::write_mode::WriteMode;

/// A client in this process.
struct Program {
    bed: Bed,
    owner: u16,
    area: Arc<Area>,
}

/// Returns the calling thread's id.
fn thread_id() -> u32 {
    jericho_sys::affinity::current_tid()
}

/// Returns the calling thread, as a request names it.
fn here() -> Asker {
    Asker {
        thread: thread_id(),
        ..asker()
    }
}

impl Program {
    fn new() -> Program {
        let bed = Bed::new();
        let fast = &bed.mounted.fast;
        let owner = fast.clients.lock().free_owner().unwrap();
        let area = Arc::new(Area::create("test", owner).unwrap());
        let client = Client::for_test(1, area.clone(), std::process::id(), true);
        fast.clients.lock().by_owner.insert(owner, client);
        Program { bed, owner, area }
    }

    /// Tells the daemon which block the thread uses, as a thread does when it asks for a slot by an ioctl.
    fn name(&self, asker: Asker, owner: u16, block: u32) {
        let call = Call::Fast {
            write: false,
            thread: Some(ClientThread {
                owner,
                block,
                instance: self.bed.mounted.fast.control.instance(),
            }),
        };
        self.bed.ask_as(&self.bed.handle, call, asker);
    }

    /// Leaves a wish in block 0, and serves a request for the handle's file. Returns what the daemon granted.
    fn wish_for(
        &self,
        ino: u64,
        write: bool,
        asker: Asker,
        handle: &Arc<Handle>,
    ) -> Option<Granted> {
        let wish = Wish {
            number: 7,
            ino,
            write,
            reserve: false,
        };
        self.area.wishing(0).leave(wish);
        self.bed.mounted.answer_wish(handle, asker, Served::Read);
        self.area.wishing(0).end(wish)
    }

    fn wish(&self, handle: &Arc<Handle>) -> Option<Granted> {
        self.wish_for(handle.file.ino(), true, here(), handle)
    }

    fn has_slot(&self, handle: &Arc<Handle>) -> bool {
        self.bed.mounted.fast.slot_file(handle.file.ino()).is_some()
    }
}

#[test]
fn a_request_grants_the_slot_that_its_thread_has_wished_for() {
    let program = Program::new();
    let fast = &program.bed.mounted.fast;
    let plain = program.bed.plain_named(b"plain");
    assert_eq!(
        program.wish(&plain),
        None,
        "the daemon does not know the thread"
    );
    assert!(!program.has_slot(&plain));
    program.name(here(), program.owner, 0);
    let granted = program.wish(&plain).expect("granted");
    let slot_file = fast.slot_file(plain.file.ino()).unwrap();
    let word = fast.info(&slot_file).word();
    assert_eq!(
        (granted.slot, granted.generation),
        (slot_file.slot, word.generation())
    );
    assert!(slot_file.is_written() && word.flags() & SlotInfo::NO_WRITE == 0);
    assert_eq!(
        program.wish(&plain),
        Some(granted),
        "likewise, when the handle has it already"
    );
    program.bed.mounted.close_file(&plain);
    assert!(
        !program.has_slot(&plain),
        "the slot comes back with the descriptor"
    );
}

#[test]
fn a_write_that_carries_a_wish_ends_before_it_grants_inline_writes() {
    let program = Program::new();
    program.name(here(), program.owner, 0);
    let plain = program.bed.plain_named(b"plain");
    let wish = Wish {
        number: 7,
        ino: plain.file.ino(),
        write: true,
        reserve: true,
    };
    program.area.wishing(0).leave(wish);
    let mounted = &program.bed.mounted;
    let (tx, rx) = mpsc::channel();
    let (strong, handle, asker) = (mounted.clone(), plain.clone(), here());
    mounted.write(&plain, 0, b"data", WriteMode::PLAIN, move |written| {
        let served = Served::Write {
            end: Some(4),
            len: 4,
            may_wait: true,
        };
        strong.answer_wish(&handle, asker, served);
        let slot_file = strong.fast.slot_file(handle.file.ino()).unwrap();
        let word = strong.fast.info(&slot_file).word();
        tx.send((written.unwrap(), word.flags() & SlotInfo::NO_WRITE))
            .unwrap();
    });
    let (written, withheld) = rx.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!((written, withheld), (4, 0));
    let granted = program.area.wishing(0).end(wish).expect("granted");
    assert_eq!(granted.reserved_to, 16);
    mounted.close_file(&plain);
}

#[test]
fn false_wishes_grant_nothing_that_the_thread_could_not_ask_for() {
    let program = Program::new();
    program.name(here(), program.owner, 0);
    let mounted = &program.bed.mounted;
    let plain = program.bed.plain_named(b"plain");
    let ino = plain.file.ino();
    assert_eq!(
        program.wish_for(ino + 1, true, here(), &plain),
        None,
        "another file"
    );
    let stranger = Asker {
        uid: 54321,
        gid: 54321,
        ..here()
    };
    assert_eq!(program.wish_for(ino, true, stranger, &plain), None);
    let unnamed = Asker {
        thread: 0,
        ..here()
    };
    program.name(unnamed, program.owner, 0);
    assert_eq!(
        program.wish_for(ino, true, unnamed, &plain),
        None,
        "of another pid namespace"
    );
    let reading = mounted.open_file(ino, false).unwrap();
    assert_eq!(program.wish_for(ino, true, here(), &reading), None);
    assert!(!program.has_slot(&plain));
    assert!(program.wish_for(ino, false, here(), &reading).is_some());
    mounted.close_file(&reading);
    mounted.close_file(&plain);
}

#[test]
fn a_client_names_only_its_own_threads() {
    let program = Program::new();
    let plain = program.bed.plain_named(b"plain");
    let init = Asker {
        thread: 1,
        ..here()
    };
    program.name(init, program.owner, 0);
    assert_eq!(program.wish_for(plain.file.ino(), true, init, &plain), None);
    program.name(here(), program.owner + 1, 0);
    assert_eq!(program.wish(&plain), None, "no client has that number");
    // The daemon maps a block number that does not exist to one that does.
    program.name(here(), program.owner, 1024);
    assert!(program.wish(&plain).is_some());
    program.bed.mounted.fast.bury(program.owner);
    assert_eq!(program.wish(&plain), None, "the client has ended");
    program.bed.mounted.close_file(&plain);
}

#[test]
fn a_grant_that_would_have_to_wait_is_not_made_with_the_request() {
    let program = Program::new();
    program.name(here(), program.owner, 0);
    let fast = &program.bed.mounted.fast;
    let plain = program.bed.plain_named(b"plain");
    let (changing, _) = fast.begin_change(plain.file.ino());
    assert_eq!(program.wish(&plain), None, "the file is being truncated");
    drop(changing);
    let grants = plain.grants.lock();
    assert_eq!(program.wish(&plain), None, "pages are being reserved");
    drop(grants);
    assert!(program.wish(&plain).is_some());
    program.bed.mounted.close_file(&plain);
}

#[test]
fn a_first_writer_gets_its_slot_at_once_and_may_write_when_other_writes_have_ended() {
    let program = Program::new();
    program.name(here(), program.owner, 0);
    let fast = &program.bed.mounted.fast;
    let plain = program.bed.plain_named(b"plain");
    let writing = plain.file.writing();
    let granted = program.wish(&plain);
    assert!(granted.is_some());
    let slot_file = fast.slot_file(plain.file.ino()).unwrap();
    let withheld = || fast.info(&slot_file).word().flags() & SlotInfo::NO_WRITE != 0;
    assert!(withheld());
    drop(writing);
    assert!(!withheld());
    program.bed.mounted.close_file(&plain);
}

#[test]
fn the_clients_are_not_locked_while_a_thread_waits_for_the_answer_to_a_wish() {
    let program = Program::new();
    let fast = &program.bed.mounted.fast;
    let thread = thread_id();
    let block = ClientThread {
        owner: program.owner,
        block: 0,
        instance: fast.control.instance(),
    };
    // Holds the lock that an answer holds while it reserves pages, together with a slice's lock.
    let answering = fast.wishers.entries[thread as usize % ENTRIES]
        .wisher
        .lock();
    std::thread::scope(|scope| {
        let (tx, rx) = mpsc::channel();
        scope.spawn(move || {
            fast.knows_thread(block, thread);
            tx.send(()).unwrap();
        });
        let named = rx.recv_timeout(Duration::from_secs(60));
        // A slice takes the lock of the clients, too, when it revokes one.
        let is_free = fast.clients.try_lock().is_some();
        drop(answering);
        assert!(
            named.is_ok() && is_free,
            "the thread waits with the clients locked"
        );
    });
    assert!(
        !program.bed.mounted.may_wish(here()),
        "the locked entry records no thread"
    );
    fast.knows_thread(block, thread);
    assert!(program.bed.mounted.may_wish(here()));
}

#[test]
fn an_entry_that_now_belongs_to_another_thread_answers_no_wish_of_the_first() {
    let area = Arc::new(Area::create("test", 7).unwrap());
    let wisher = |block| Wisher {
        owner: 7,
        block,
        area: area.clone(),
    };
    let (wishers, first) = (Wishers::default(), 100);
    let second = first + ENTRIES as u32;
    wishers.add(first, wisher(0));
    // A request of the first thread finds the entry, then another thread names itself.
    let entry = wishers.entry(first).expect("the first thread's");
    wishers.add(second, wisher(1));
    assert!(entry.lock(first).is_none(), "another thread's wish");
    let locked = entry.lock(second).expect("the second thread's");
    assert_eq!(locked.as_ref().map(|wisher| wisher.block), Some(1));
}
