/*
 * Does the same as relay.c with requests through the FUSE ring (FUSE over io_uring, Linux 6.14):
 *
 *   relay_ring FILE OFFSET BYTES DIR
 *
 * A thread for each CPU serves that CPU's queue, with one io_uring for requests and the device. The threads may run on any
 * CPU, because threads bound to their CPUs were slower. The kernel must have FUSE over io_uring enabled
 * (/sys/module/fuse/parameters/enable_uring).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { DEPTH = 32, READ_MAX = 1 << 20, REQUEST_MAX = READ_MAX + 4096 };
enum { DEVICE, FUSE }; /* registered files */
enum { FROM_DEVICE = 0x100 };

/* From linux/fuse.h of FUSE 7.42, which older systems do not have. */
enum { REGISTER = 1, COMMIT_AND_FETCH = 2, OVER_IO_URING = 1 << (41 - 32) };
struct ring_header {
    char in_out[128], op[128];
    uint64_t flags, commit_id;
    uint32_t payload_bytes, padding;
    uint64_t reserved;
};
struct ring_command {
    uint64_t flags, commit_id;
    uint16_t queue;
    uint8_t padding[6];
};

/* An entry for a request. */
struct entry {
    struct ring_header head;
    char *payload;
    struct iovec parts[2];
};

static int device, fuse;
static uint64_t start, length;

static void die(const char *what)
{
    fprintf(stderr, "relay_ring: %s: %s\n", what, strerror(errno));
    exit(1);
}

static struct fuse_attr attributes(uint64_t node)
{
    struct fuse_attr a = {.ino = node, .nlink = 1, .blksize = 4096, .size = length, .blocks = length / 512};
    a.mode = node == FUSE_ROOT_ID ? S_IFDIR | 0755 : S_IFREG | 0444;
    return a;
}

/* Writes the answer to any request but a read into `out`. Returns its bytes, or a negative errno. */
static int answer(uint32_t opcode, uint64_t node, void *out)
{
    switch (opcode) {
    case FUSE_LOOKUP: {
        struct fuse_entry_out *entry = out;
        *entry = (struct fuse_entry_out){.nodeid = 2, .entry_valid = 3600, .attr_valid = 3600};
        entry->attr = attributes(2);
        return sizeof *entry;
    }
    case FUSE_GETATTR: {
        struct fuse_attr_out *attr = out;
        *attr = (struct fuse_attr_out){.attr_valid = 3600, .attr = attributes(node)};
        return sizeof *attr;
    }
    case FUSE_OPEN:
        *(struct fuse_open_out *)out = (struct fuse_open_out){.open_flags = FOPEN_DIRECT_IO};
        return sizeof(struct fuse_open_out);
    case FUSE_RELEASE:
        return 0;
    default:
        return -ENOSYS;
    }
}

/* A submission entry of a ring created with IORING_SETUP_SQE128. */
struct long_sqe {
    struct io_uring_sqe sqe;
    char more[64];
};

static struct io_uring_sqe *next(struct io_uring *ring)
{
    struct long_sqe *place = (void *)io_uring_get_sqe(ring);
    if (!place) die("the ring is full");
    *place = (struct long_sqe){0};
    return &place->sqe;
}

static void command(struct io_uring *ring, int what, struct entry *entry, uint64_t index, uint16_t queue)
{
    struct io_uring_sqe *sqe = next(ring);
    sqe->opcode = IORING_OP_URING_CMD;
    sqe->fd = FUSE;
    sqe->flags = IOSQE_FIXED_FILE;
    sqe->cmd_op = what;
    sqe->user_data = index;
    if (what == REGISTER) {
        sqe->addr = (uint64_t)(uintptr_t)entry->parts;
        sqe->len = 2;
    }
    struct ring_command *c = (struct ring_command *)((char *)sqe + offsetof(struct io_uring_sqe, cmd));
    c->queue = queue;
    c->commit_id = entry->head.commit_id;
}

static void *serve(void *argument)
{
    uint16_t queue = (uintptr_t)argument;
    struct io_uring ring;
    struct io_uring_params params = {
        .flags = IORING_SETUP_SQE128 | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
    if (io_uring_queue_init_params(2 * DEPTH, &ring, &params) < 0) die("io_uring");
    int files[] = {device, fuse};
    size_t bytes = (size_t)DEPTH * READ_MAX;
    char *payloads = aligned_alloc(2 << 20, bytes);
    struct entry *entries = aligned_alloc(64, DEPTH * sizeof *entries);
    if (!payloads || !entries) die("memory");
    memset(payloads, 0, bytes);
    memset(entries, 0, DEPTH * sizeof *entries);
    struct iovec all = {payloads, bytes};
    if (io_uring_register_files(&ring, files, 2) < 0 || io_uring_register_buffers(&ring, &all, 1) < 0) die("io_uring");
    for (unsigned i = 0; i < DEPTH; i++) {
        struct entry *entry = &entries[i];
        entry->payload = payloads + (size_t)i * READ_MAX;
        entry->parts[0] = (struct iovec){&entry->head, sizeof entry->head};
        entry->parts[1] = (struct iovec){entry->payload, READ_MAX};
        command(&ring, REGISTER, entry, i, queue);
    }
    for (;;) {
        io_uring_submit_and_wait(&ring, 1);
        struct io_uring_cqe *done;
        while (io_uring_peek_cqe(&ring, &done) == 0) {
            uint64_t tag = done->user_data;
            int result = done->res;
            io_uring_cqe_seen(&ring, done);
            uint64_t index = tag & ~(uint64_t)FROM_DEVICE;
            struct entry *entry = &entries[index];
            struct fuse_in_header *head = (void *)entry->head.in_out;
            if (!(tag & FROM_DEVICE)) {
                if (result < 0) {
                    errno = -result;
                    if (result == -ENOTCONN || result == -ECANCELED) return NULL;
                    die("/dev/fuse");
                }
                const struct fuse_read_in *in = (void *)entry->head.op;
                if (head->opcode == FUSE_READ && in->size <= READ_MAX && in->offset + in->size <= length) {
                    struct io_uring_sqe *sqe = next(&ring);
                    io_uring_prep_read_fixed(sqe, DEVICE, entry->payload, in->size, start + in->offset, 0);
                    sqe->flags |= IOSQE_FIXED_FILE;
                    sqe->user_data = index | FROM_DEVICE;
                    continue;
                }
                result = answer(head->opcode, head->nodeid, entry->payload);
            }
            struct fuse_out_header out = {.error = result < 0 ? result : 0, .unique = head->unique};
            entry->head.payload_bytes = result < 0 ? 0 : result;
            out.len = sizeof out + entry->head.payload_bytes;
            memcpy(entry->head.in_out, &out, sizeof out);
            command(&ring, COMMIT_AND_FETCH, entry, index, queue);
        }
    }
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: relay_ring FILE OFFSET BYTES DIR\n");
        return 2;
    }
    start = strtoull(argv[2], NULL, 10);
    length = strtoull(argv[3], NULL, 10);
    if ((device = open(argv[1], O_RDONLY | O_DIRECT)) < 0) die(argv[1]);
    if ((fuse = open("/dev/fuse", O_RDWR)) < 0) die("/dev/fuse");
    char options[100];
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=%d,group_id=%d", fuse, getuid(), getgid());
    if (mount("relay_ring", argv[4], "fuse.relay", 0, options) < 0) die(argv[4]);
    char *request = malloc(REQUEST_MAX);
    if (!request) die("memory");
    puts("mounted");
    fflush(stdout);
    /* Serves the handshake. Ignores the other requests that do not come through the ring, such as FORGET, which needs no reply. */
    for (;;) {
        ssize_t got = read(fuse, request, REQUEST_MAX);
        if (got < 0) {
            if (errno == ENODEV) return 0;
            if (errno == EINTR || errno == ENOENT) continue;
            die("/dev/fuse");
        }
        const struct fuse_in_header *head = (const void *)request;
        if (head->opcode != FUSE_INIT) continue;
        const struct fuse_init_in *in = (const void *)(head + 1);
        if (!(in->flags2 & OVER_IO_URING)) {
            errno = EOPNOTSUPP;
            die("the kernel's ring");
        }
        struct {
            struct fuse_out_header head;
            struct fuse_init_out init;
        } out = {.head = {.len = sizeof out, .unique = head->unique}};
        out.init.major = FUSE_KERNEL_VERSION;
        out.init.minor = in->minor;
        out.init.max_readahead = in->max_readahead;
        out.init.flags = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_MAX_PAGES | FUSE_ASYNC_DIO | FUSE_INIT_EXT;
        out.init.flags2 = OVER_IO_URING;
        out.init.max_background = out.init.congestion_threshold = 2 * DEPTH;
        out.init.max_write = READ_MAX;
        out.init.max_pages = READ_MAX / 4096;
        out.init.time_gran = 1;
        if (write(fuse, &out, sizeof out) < 0) die("/dev/fuse");
        long queues = sysconf(_SC_NPROCESSORS_CONF);
        for (long queue = 0; queue < queues; queue++) {
            pthread_t thread;
            if (pthread_create(&thread, NULL, serve, (void *)queue) != 0) die("thread");
        }
    }
}
