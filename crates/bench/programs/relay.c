/*
 * A filesystem in which every name is the same bytes of one file, read with direct I/O.
 *
 *   relay FILE OFFSET BYTES DIR
 *
 * The minimal daemon that reads from a device for requests through /dev/fuse: one thread, one io_uring that waits for
 * requests and for the device, no cache, and no second thread to wake. Prints "mounted" when it is, and ends when DIR is
 * unmounted.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <linux/fuse.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { DEPTH = 64, READ_MAX = 1 << 20, REQUEST_MAX = READ_MAX + 4096, REQUESTS_COME = DEPTH };

/* A read in flight at the device. */
struct slot {
    uint64_t unique;
    char *buffer;
};

static struct slot slots[DEPTH];
static unsigned free_slots[DEPTH], free_count = DEPTH;
static struct io_uring ring;
static int device, fuse;
static uint64_t start, length;

static void die(const char *what)
{
    fprintf(stderr, "relay: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void reply(uint64_t unique, int error, const void *body, size_t bytes)
{
    struct fuse_out_header head = {.len = sizeof head + bytes, .error = error, .unique = unique};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)body, bytes}};
    /* ENOENT: the program was interrupted and no longer waits. */
    if (writev(fuse, parts, 2) < 0 && errno != ENOENT) die("reply");
}

static struct fuse_attr attributes(uint64_t node)
{
    struct fuse_attr a = {.ino = node, .nlink = 1, .blksize = 4096, .size = length, .blocks = length / 512};
    a.mode = node == FUSE_ROOT_ID ? S_IFDIR | 0755 : S_IFREG | 0444;
    return a;
}

static void start_read(uint64_t unique, const struct fuse_read_in *in)
{
    if (in->size > READ_MAX || in->offset + in->size > length) return reply(unique, -EINVAL, NULL, 0);
    unsigned index = free_slots[--free_count];
    slots[index].unique = unique;
    struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
    io_uring_prep_read_fixed(entry, 0, slots[index].buffer, in->size, start + in->offset, 0);
    entry->flags |= IOSQE_FIXED_FILE;
    entry->user_data = index;
}

/* Handles one request, if there is one. */
static int take_request(char *request)
{
    ssize_t got = read(fuse, request, REQUEST_MAX);
    if (got < 0) {
        if (errno == ENODEV) exit(0);
        if (errno == EINTR || errno == ENOENT) return 1;
        if (errno == EAGAIN) return 0;
        die("/dev/fuse");
    }
    const struct fuse_in_header *head = (const void *)request;
    const void *body = head + 1;
    switch (head->opcode) {
    case FUSE_INIT: {
        const struct fuse_init_in *in = body;
        struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION};
        out.max_readahead = in->max_readahead;
        out.flags = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_MAX_PAGES | FUSE_ASYNC_DIO;
        out.max_background = out.congestion_threshold = DEPTH;
        out.max_write = READ_MAX;
        out.max_pages = READ_MAX / 4096;
        out.time_gran = 1;
        reply(head->unique, 0, &out, sizeof out);
        break;
    }
    case FUSE_LOOKUP: {
        struct fuse_entry_out out = {.nodeid = 2, .entry_valid = 3600, .attr_valid = 3600};
        out.attr = attributes(2);
        reply(head->unique, 0, &out, sizeof out);
        break;
    }
    case FUSE_GETATTR: {
        struct fuse_attr_out out = {.attr_valid = 3600, .attr = attributes(head->nodeid)};
        reply(head->unique, 0, &out, sizeof out);
        break;
    }
    case FUSE_OPEN: {
        struct fuse_open_out out = {.open_flags = FOPEN_DIRECT_IO};
        reply(head->unique, 0, &out, sizeof out);
        break;
    }
    case FUSE_READ:
        start_read(head->unique, body);
        break;
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
        break;
    default:
        reply(head->unique, head->opcode == FUSE_RELEASE ? 0 : -ENOSYS, NULL, 0);
    }
    return 1;
}

static void expect_requests(void)
{
    struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
    io_uring_prep_poll_multishot(entry, fuse, POLLIN);
    entry->user_data = REQUESTS_COME;
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: relay FILE OFFSET BYTES DIR\n");
        return 2;
    }
    start = strtoull(argv[2], NULL, 10);
    length = strtoull(argv[3], NULL, 10);
    if ((device = open(argv[1], O_RDONLY | O_DIRECT)) < 0) die(argv[1]);
    if ((fuse = open("/dev/fuse", O_RDWR | O_NONBLOCK)) < 0) die("/dev/fuse");
    char options[100];
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=%d,group_id=%d", fuse, getuid(), getgid());
    if (mount("relay", argv[4], "fuse.relay", 0, options) < 0) die(argv[4]);

    struct io_uring_params params = {.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
    if (io_uring_queue_init_params(2 * DEPTH, &ring, &params) < 0) die("io_uring");
    size_t bytes = (size_t)DEPTH * READ_MAX;
    char *buffers = aligned_alloc(2 << 20, bytes), *request = malloc(REQUEST_MAX);
    if (!buffers || !request) die("memory");
    memset(buffers, 0, bytes);
    struct iovec all = {buffers, bytes};
    if (io_uring_register_files(&ring, &device, 1) < 0 || io_uring_register_buffers(&ring, &all, 1) < 0)
        die("io_uring");
    for (unsigned i = 0; i < DEPTH; i++) {
        slots[i].buffer = buffers + (size_t)i * READ_MAX;
        free_slots[i] = i;
    }

    expect_requests();
    puts("mounted");
    fflush(stdout);
    for (;;) {
        io_uring_submit_and_wait(&ring, 1);
        struct io_uring_cqe *entry;
        while (io_uring_peek_cqe(&ring, &entry) == 0) {
            uint64_t index = entry->user_data;
            int result = entry->res, goes_on = entry->flags & IORING_CQE_F_MORE;
            io_uring_cqe_seen(&ring, entry);
            if (index == REQUESTS_COME) {
                if (!goes_on) expect_requests();
            } else {
                reply(slots[index].unique, result < 0 ? result : 0, slots[index].buffer, result < 0 ? 0 : result);
                free_slots[free_count++] = index;
            }
        }
        while (free_count > 0 && take_request(request)) {}
    }
}
