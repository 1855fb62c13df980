/*
 * accesses LOG OPERATION BYTES PIECE MILLISECONDS CPU,FILE...: a thread for each FILE reads or writes random pieces of PIECE bytes of the file's
 * first BYTES bytes (OPERATION `read` or `write`), or writes all of them once (`fill`). It is bound to CPU, or free to run on all CPUs if
 * CPU is -1. All threads begin together.
 *
 * With `read` and `write`, the threads work in passes without pauses between them. A pass lasts MILLISECONDS at least. Then the program prints `pass`, and the
 * next pass begins with the next byte of its standard input. The program ends when its input ends. It then prints `buffer THREAD NODE` for each thread: the node of the thread's
 * buffer, as the kernel says.
 *
 * LOG gets all accesses, as `struct access` below, with times of the CPU's time-stamp counter.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

/* ACCESSES fill 4 MiB. */
enum { PAGE = 4096, ACCESSES = 131071 };

/* crates/cli/tests/lab/accesses.rs reads this. */
struct access {
    uint64_t begin, end;
    uint32_t thread, page, pages;
    uint16_t pass, file;
};

/* The log grows by parts. The memory of a part is in place before its first access: threads that fault in pages while others map memory would wait for each
   other, and would often sleep instead of accessing files. */
struct part {
    struct part *before;
    size_t used;
    struct access accesses[ACCESSES];
};

struct worker {
    int number, cpu;
    pid_t id;
    const char *file;
    char *buffer;
    struct part *log;
    pthread_t thread;
};

static pthread_barrier_t together;
static enum { READ, WRITE, FILL } operation;
static size_t bytes, piece;
/* The pass in progress; -1: the end. */
static volatile int pass;

static void fail(const char *what)
{
    perror(what);
    exit(3);
}

static void add_part(struct worker *me)
{
    struct part *part = mmap(NULL, sizeof *part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    /* The kernel's collector of huge pages has the lowest priority, and may hold the lock of the memory for seconds. */
    if (part == MAP_FAILED || madvise(part, sizeof *part, MADV_NOHUGEPAGE) || madvise(part, sizeof *part, MADV_POPULATE_WRITE))
        fail("the log");
    part->before = me->log;
    me->log = part;
}

static void add(struct worker *me, struct access access)
{
    if (me->log->used == ACCESSES)
        add_part(me);
    me->log->accesses[me->log->used++] = access;
}

static void access_once(struct worker *me, int fd, size_t number, int in_pass)
{
    off_t at = (off_t)(number * piece);
    struct access access = {.begin = __rdtsc()};
    ssize_t done = operation == READ ? pread(fd, me->buffer, piece, at) : pwrite(fd, me->buffer, piece, at);
    access.end = __rdtsc();
    if (done != (ssize_t)piece)
        fail(me->file);
    access.thread = (uint32_t)me->id;
    access.page = (uint32_t)((size_t)at / PAGE);
    access.pages = (uint32_t)((piece + PAGE - 1) / PAGE);
    access.pass = (uint16_t)in_pass;
    access.file = (uint16_t)me->number;
    add(me, access);
}

static void *run(void *argument)
{
    struct worker *me = argument;
    uint64_t random = 88172645463325252u * (uint64_t)(me->number + 1);
    cpu_set_t one;

    me->id = (pid_t)syscall(SYS_gettid);
    CPU_ZERO(&one);
    if (me->cpu >= 0) {
        CPU_SET(me->cpu, &one);
        if (sched_setaffinity(0, sizeof one, &one))
            fail("sched_setaffinity");
    }
    if (posix_memalign((void **)&me->buffer, PAGE, piece))
        fail("memory");
    memset(me->buffer, 'j', piece);
    add_part(me);
    int fd = open(me->file, operation == READ ? O_RDONLY : O_WRONLY | O_CREAT, 0644);
    if (fd < 0)
        fail(me->file);
    pthread_barrier_wait(&together);
    if (operation == FILL) {
        for (size_t number = 0; number < bytes / piece; number++)
            access_once(me, fd, number, 0);
    } else {
        for (int in_pass; (in_pass = pass) >= 0;) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            access_once(me, fd, random % (bytes / piece), in_pass);
        }
    }
    close(fd);
    return NULL;
}

static void write_log(const char *path, struct worker *workers, int count)
{
    FILE *log = fopen(path, "w");
    if (!log)
        fail(path);
    for (int n = 0; n < count; n++)
        for (struct part *part = workers[n].log; part; part = part->before)
            if (fwrite(part->accesses, sizeof part->accesses[0], part->used, log) != part->used)
                fail(path);
    if (fclose(log))
        fail(path);
}

int main(int count, char **arguments)
{
    int threads = count - 6;
    if (threads < 1)
        return 2;
    struct worker *workers = calloc((size_t)threads, sizeof *workers);
    if (!workers)
        fail("memory");
    operation = strcmp(arguments[2], "read") == 0 ? READ : strcmp(arguments[2], "write") == 0 ? WRITE : FILL;
    bytes = strtoul(arguments[3], NULL, 10);
    piece = strtoul(arguments[4], NULL, 10);
    int milliseconds = atoi(arguments[5]);
    if (!piece || bytes < piece)
        return 2;
    pthread_barrier_init(&together, NULL, (unsigned)threads);
    for (int n = 0; n < threads; n++) {
        char *cpu = strtok(arguments[n + 6], ","), *file = strtok(NULL, ",");
        if (!file)
            return 2;
        workers[n] = (struct worker){.number = n, .cpu = atoi(cpu), .file = file};
        if (pthread_create(&workers[n].thread, NULL, run, &workers[n]))
            return 4;
    }
    if (operation != FILL) {
        for (char next; pass >= 0;) {
            usleep((useconds_t)milliseconds * 1000);
            puts("pass");
            fflush(stdout);
            pass = read(0, &next, 1) == 1 ? pass + 1 : -1;
        }
    }
    for (int n = 0; n < threads; n++)
        pthread_join(workers[n].thread, NULL);
    write_log(arguments[1], workers, threads);
    for (int n = 0; n < threads; n++) {
        void *page = workers[n].buffer;
        int node = -1;
        /* The kernel may be moving the page. */
        for (int tries = 0; node < 0 && tries < 100; tries++) {
            *(volatile char *)page = 'j';
            if (syscall(SYS_move_pages, 0, 1UL, &page, NULL, &node, 0))
                fail("move_pages");
        }
        printf("buffer %d %d\n", workers[n].id, node);
    }
    return 0;
}
