/* Which source this library was made from: __init__.py compares it with the source that it finds. */
__attribute__((visibility("default"))) const char *awexd_native_source(void) { return AWEXD_SOURCE_HASH; }
