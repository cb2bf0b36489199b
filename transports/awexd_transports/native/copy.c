/* Placeholder: what copies and sums comes here. */
#include <stdint.h>

/* To be raised, with VERSION in __init__.py, when a function changes. */
__attribute__((visibility("default"))) uint64_t awexd_native_version(void) { return 1; }
