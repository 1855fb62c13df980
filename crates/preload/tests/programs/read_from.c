/* A program that inherited an fd: its next 10 bytes are those from an offset. Also linked statically, where no library can be
   preloaded. Usage: read_from FD OFFSET */
#include "check.h"

int main(int argc, char **argv) {
    CHECK(argc == 3);
    NEXT_ARE_FROM(atoi(argv[1]), atol(argv[2]));
    return 0;
}
