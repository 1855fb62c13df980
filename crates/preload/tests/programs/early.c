/* Uses an fd that a library opened before main, and leaves it to the library's destructor. */
#include "check.h"

int early_descriptor(void);
void early_register(void);

int main(void) {
    NEXT_ARE_FROM(early_descriptor(), 10);
    early_register();
    done("main");
    return 0;
}
