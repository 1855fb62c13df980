/* A library that uses files before main and after it. */
#include "check.h"

static int kept = -1;

__attribute__((constructor)) static void begin(void) {
    const char *dir = getenv("JERICHO_TEST_EARLY");
    CHECK(dir && chdir(dir) == 0);
    fill("early", 10000);
    kept = open("early", O_RDWR);
    CHECK(kept > 2);
    NEXT_ARE_FROM(kept, 0);
    done("constructor");
}

int early_descriptor(void) { return kept; }

static void at_exit(void) { NEXT_ARE_FROM(kept, 20); }

__attribute__((destructor)) static void end(void) {
    NEXT_ARE_FROM(kept, 30);
    int fd = open("late", O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd > 2 && write(fd, "late", 4) == 4 && close(fd) == 0);
    CHECK(close(kept) == 0);
    CHECK(write(1, "destructor\n", 11) == 11);
}

void early_register(void) { CHECK(atexit(at_exit) == 0); }
