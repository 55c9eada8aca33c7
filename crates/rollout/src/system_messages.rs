//! Which system messages a chat template allows, and how others are shown.
//!
//! Agents send several: instructions of their own and of the user, and later ones in the middle of the
//! conversation. Many templates allow one, at the start; some raise an exception for others, some leave
//! them out without a word. [`SystemMessages::of`] finds out by rendering probes.
//!
//! The invariant: a conversation that the template shows as a whole is rendered as it is.

use crate::api::Message;
use crate::chat::message;

/// Between texts that become one message.
const SEPARATOR: &str = "\n\n";

/// What a template allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "four independent findings")]
pub(crate) struct SystemMessages {
    /// One at the start.
    first: bool,
    /// Several at the start.
    several: bool,
    /// One after a reply.
    later: bool,
    /// Two user messages in a row.
    users_in_a_row: bool,
}

impl SystemMessages {
    /// What the template allows that `render` renders with. A message is allowed if its text is shown.
    pub(crate) fn of<E>(render: impl Fn(&[Message]) -> Result<String, E>) -> Self {
        let shows = |conversation: &[(&str, &str)]| {
            let all: Vec<Message> =
                conversation.iter().map(|(role, text)| message(role, text)).collect();
            render(&all).is_ok_and(|shown| {
                let mut rest = shown.as_str();
                conversation.iter().all(|(_, text)| match rest.split_once(text) {
                    Some((_, after)) => {
                        rest = after;
                        true
                    }
                    None => false,
                })
            })
        };
        let (one, two) = (("system", "probe rule one"), ("system", "probe rule two"));
        let (ask, reply) = (("user", "probe question"), ("assistant", "probe reply"));
        Self {
            first: shows(&[one, ask]),
            several: shows(&[one, two, ask]),
            later: shows(&[ask, reply, two, ("user", "probe request")]),
            users_in_a_row: shows(&[ask, ("user", "probe request")]),
        }
    }

    /// Whether every conversation stays as it is.
    pub(crate) fn allows_all(self) -> bool {
        let Self { first, several, later, users_in_a_row: _ } = self;
        first && several && later
    }

    /// The conversation in a form that the template allows. System messages at the start become one, if
    /// several are not allowed; all others that are not allowed become messages of the user.
    pub(crate) fn arrange(self, messages: Vec<Message>) -> Vec<Message> {
        let is_system = |message: &Message| message.role == "system";
        if self.allows_all() || !messages.iter().any(is_system) {
            return messages;
        }
        let start = messages.iter().take_while(|message| is_system(message)).count();
        let mut arranged: Vec<Message> = Vec::with_capacity(messages.len());
        let mut last_was_system = false;
        for (index, mut message) in messages.into_iter().enumerate() {
            let is_converted =
                is_system(&message) && if index < start { !self.first } else { !self.later };
            if is_converted {
                "user".clone_into(&mut message.role);
            }
            let joins = |last: &Message| {
                let is_at_start = index > 0 && index < start;
                let is_user = last.role == "user" && message.role == "user";
                (is_at_start && self.first && !self.several)
                    || (is_user && !self.users_in_a_row && (is_converted || last_was_system))
            };
            match arranged.last_mut().filter(|last| joins(last)) {
                Some(last) => {
                    last.content.push_str(SEPARATOR);
                    last.content.push_str(&message.content);
                }
                None => arranged.push(message),
            }
            last_was_system = is_converted;
        }
        arranged
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::ChatTemplate;

    const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    const FIRST_ONLY: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
        {{ raise_exception('late') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    const DROPS_LATER: &str = "{% for m in messages %}{% if m.role != 'system' or loop.first %}\
        <{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}";
    const ALTERNATES: &str = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
        {{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";

    fn shown(template: &str, messages: &[(&str, &str)]) -> String {
        let template = ChatTemplate::new(template).unwrap();
        let found = SystemMessages::of(|messages| template.render(messages, &[], true));
        let messages = messages.iter().map(|(role, text)| message(role, text)).collect();
        template.render(&found.arrange(messages), &[], true).unwrap()
    }

    #[test]
    fn system_messages_are_shown_by_every_template() {
        let all = [
            ("system", "a"),
            ("system", "b"),
            ("user", "c"),
            ("assistant", "d"),
            ("system", "e"),
            ("user", "f"),
            ("system", "g"),
        ];
        let as_sent = "<system>a<system>b<user>c<assistant>d<system>e<user>f<system>g";
        assert_eq!(shown(PLAIN, &all), as_sent);
        let merged = "<system>a\n\nb<user>c<assistant>d<user>e<user>f<user>g";
        assert_eq!(shown(FIRST_ONLY, &all), merged);
        assert_eq!(shown(DROPS_LATER, &all), merged);
        assert_eq!(shown(ALTERNATES, &all), "<user>a\n\nb\n\nc<assistant>d<user>e\n\nf\n\ng");
    }

    #[test]
    fn a_conversation_that_the_template_shows_stays_as_it_is() {
        let one = [("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")];
        assert_eq!(shown(FIRST_ONLY, &one), "<system>a<user>b<assistant>c<user>d");
        let users = [("user", "a"), ("user", "b")];
        assert_eq!(shown(FIRST_ONLY, &users), "<user>a<user>b");
    }
}
