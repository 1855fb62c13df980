/* One process stores through a shared mapping to one half of a page while another writes the other half by a call: pwrite(2), an
   asynchronous write, a copy (copy_file_range(2)) from FILE.source, or pwrite(2) and then a hole (fallocate(2)). Prints the number of
   pairs, of lost writes and of lost stores. A write or a store is lost if its bytes are missing when both are done. Then waits until
   the mapping shows the last write. Usage: halves FILE PAIRS pwrite|aio|copy|punch [COMMAND...]. FILE has at least one page. With
   COMMAND, COMMAND starts the writing process (COMMAND... PROGRAM -w FILE PAIRS WAY), which reopens the file after every REOPEN
   pairs. */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, HALF = PAGE / 2, REOPEN = 25, TURNS = 9 };

/* The last pair that was begun, and the last pair that the writer has finished. */
struct turns {
    _Atomic uint64_t begun;
    _Atomic uint64_t finished;
};

static void await(_Atomic uint64_t *turn, uint64_t pair)
{
    /* The other process may need this processor. */
    for (int spins = 0; atomic_load(turn) < pair; spins++)
        if (spins % 1024 == 1023)
            sched_yield();
}

static void aio_write(aio_context_t context, int fd, const uint64_t *value)
{
    struct iocb write = {
        .aio_lio_opcode = IOCB_CMD_PWRITE,
        .aio_fildes = fd,
        .aio_buf = (uintptr_t)value,
        .aio_nbytes = sizeof *value,
        .aio_offset = HALF,
    }, *writes = &write;
    struct io_event event;
    if (syscall(SYS_io_submit, context, 1, &writes) != 1)
        err(2, "io_submit");
    if (syscall(SYS_io_getevents, context, 1, 1, &event, NULL) != 1 || event.res != sizeof *value)
        err(2, "io_getevents");
}

static void copy(int source, int fd, const uint64_t *value)
{
    loff_t from = HALF + sizeof *value, to = HALF;
    if (pwrite(source, value, sizeof *value, from) != sizeof *value)
        err(2, "pwrite to the source");
    if (copy_file_range(source, &from, fd, &to, sizeof *value, 0) != sizeof *value)
        err(2, "copy_file_range");
}

static void write_halves(const char *path, struct turns *turns, uint64_t pairs, const char *way, int reopens)
{
    int is_aio = strcmp(way, "aio") == 0, is_hole = strcmp(way, "punch") == 0, source = -1;
    aio_context_t context = 0;
    int fd = open(path, O_RDWR);
    if (fd < 0)
        err(2, "%s", path);
    if (syscall(SYS_io_setup, 1, &context) != 0)
        err(2, "io_setup");
    if (strcmp(way, "copy") == 0) {
        char name[4096];
        snprintf(name, sizeof name, "%s.source", path);
        source = open(name, O_RDWR | O_CREAT, 0600);
        if (source < 0)
            err(2, "%s", name);
    }
    for (uint64_t pair = 1; pair <= pairs; pair++) {
        if (reopens && pair % REOPEN == 0) {
            close(fd);
            if ((fd = open(path, O_RDWR)) < 0)
                err(2, "%s", path);
        }
        await(&turns->begun, pair);
        if (is_aio)
            aio_write(context, fd, &pair);
        else if (source >= 0)
            copy(source, fd, &pair);
        else if (pwrite(fd, &pair, sizeof pair, HALF) != sizeof pair)
            err(2, "pwrite");
        if (is_hole && fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, HALF, HALF) != 0)
            err(2, "fallocate");
        atomic_store(&turns->finished, pair);
    }
    /* exit and not _exit: the preload library writes its report at exit. */
    exit(0);
}

/* Maps the memory that both processes have open as descriptor TURNS. */
static struct turns *shared_turns(void)
{
    struct turns *turns = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, TURNS, 0);
    if (turns == MAP_FAILED)
        err(2, "mmap");
    return turns;
}

static void start_writer(char **argv, char **command, int words)
{
    char *args[words + 6];
    memcpy(args, command, words * sizeof *args);
    char *rest[] = {argv[0], "-w", argv[1], argv[2], argv[3], NULL};
    memcpy(args + words, rest, sizeof rest);
    execv(args[0], args);
    err(2, "%s", args[0]);
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "-w") == 0)
        write_halves(argv[2], shared_turns(), strtoull(argv[3], NULL, 10), argv[4], 1);
    if (argc < 4)
        errx(2, "usage: halves FILE PAIRS pwrite|aio|copy|punch [COMMAND...]");
    int is_hole = strcmp(argv[3], "punch") == 0;
    uint64_t pairs = strtoull(argv[2], NULL, 10), writes = 0, stores = 0;
    int memory = memfd_create("turns", 0);
    if (memory < 0 || ftruncate(memory, PAGE) != 0 || dup2(memory, TURNS) != TURNS)
        err(2, "memfd");
    struct turns *turns = shared_turns();
    pid_t writer = fork();
    if (writer < 0)
        err(2, "fork");
    if (writer == 0 && argc > 4)
        start_writer(argv, argv + 4, argc - 4);
    if (writer == 0)
        write_halves(argv[1], turns, pairs, argv[3], 0);
    int fd = open(argv[1], O_RDWR);
    if (fd < 0)
        err(2, "%s", argv[1]);
    volatile uint64_t *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        err(2, "mmap of %s", argv[1]);
    /* Loads the page into the mapping before the first pair. */
    (void)page[0];
    for (uint64_t pair = 1; pair <= pairs; pair++) {
        atomic_store(&turns->begun, pair);
        /* Delays the store differently in each pair, so that stores meet different moments of the write. */
        for (volatile unsigned delay = 0; delay < pair * 37 % 8192; delay++)
            ;
        page[0] = pair;
        await(&turns->finished, pair);
        uint64_t found[PAGE / sizeof(uint64_t)];
        if (pread(fd, found, PAGE, 0) != PAGE)
            err(2, "pread");
        stores += found[0] != pair;
        writes += found[HALF / sizeof(uint64_t)] != (is_hole ? 0 : pair);
    }
    while (page[HALF / sizeof(uint64_t)] != (is_hole ? 0 : pairs))
        sched_yield();
    int status;
    if (waitpid(writer, &status, 0) != writer || status != 0)
        errx(2, "the writer failed");
    printf("%llu pairs %llu writes lost %llu stores lost\n", (unsigned long long)pairs, (unsigned long long)writes, (unsigned long long)stores);
    return 0;
}
