//! Both guests, against memory with known contents.
