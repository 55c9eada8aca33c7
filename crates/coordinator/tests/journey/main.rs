//! Whole runs against a scripted world: what they do, and what a kill at any point leaves behind.

#[cfg(test)]
mod evaluation;
#[cfg(test)]
mod formats;
#[cfg(test)]
mod parts;
#[cfg(test)]
mod recovery;
#[cfg(test)]
mod run;
#[cfg(test)]
mod spans;
#[cfg(test)]
mod support;
