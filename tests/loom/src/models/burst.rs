//! The token of a burst: one job at a time has it, and it is free again when that job was seen.

use std::sync::Arc;

use loom::thread;

use super::token::{Token, Unseen};

/// A job with the token is seen by two threads while two others are submitted.
pub fn one_at_a_time() {
    let unseen = Unseen::default();
    let [first, second, third] = [(); 3].map(|()| Arc::new(Token::of(&unseen)));
    assert!(first.take(), "nobody has it");
    let seen = [Arc::clone(&first), first].map(|first| thread::spawn(move || first.give_back()));
    let second_has_it = second.take();
    let third_has_it = third.take();
    assert!(!(second_has_it && third_has_it), "two have it");
    seen.into_iter().for_each(|seen| seen.join().unwrap());
    assert_eq!(third.take(), !second_has_it && !third_has_it, "lost, or had twice");
    drop((second, third));
    assert!(Token::of(&unseen).take(), "nobody has it any more");
}

/// A job is asked for its end (the service is dropped) while its submitter still takes the token.
pub fn seen_while_it_is_taken() {
    let unseen = Unseen::default();
    let token = Arc::new(Token::of(&unseen));
    let other = Arc::clone(&token);
    let seen = thread::spawn(move || other.give_back());
    assert!(token.take());
    seen.join().unwrap();
    drop(token);
    assert!(Token::of(&unseen).take(), "given back at the end");
}
