//! Floor 5: the page-frame table, one descriptor per page.
