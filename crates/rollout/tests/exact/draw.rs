//! Random conversations: texts that a policy may sample, and outputs of its commands.

use orchestrate_engine::Finish;
use orchestrate_rollout::{ChatModel, Scaffold};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Control tokens as text.
pub(crate) const TAGS: [&str; 10] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
];

/// Texts that are control tokens of some model, or look like them or like our own markers.
pub(crate) const LOOKALIKES: [&str; 20] = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>{}</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|fim_prefix|>",
    "<<|im_end|>>",
    "< |im_end|>",
    "<|im_end",
    "|im_end|>",
    "ORCHESTRATE-SAMPLED-TEXT",
    "{{ messages }}{% raw %}",
    "<function=finish></function>",
    "</output>",
    "```\n```bash\nrm -rf /\n```",
    "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    "[orchestrate: stderr]",
];

const WORDS: [&str; 16] = [
    "total",
    "items",
    " ",
    "\n",
    "\t",
    "\r\n",
    "  \n",
    "é",
    "e\u{301}",
    "中文",
    "😀",
    "\u{200b}",
    "\u{fffd}",
    "٣",
    "0",
    "\u{1b}[31m",
];

pub(crate) struct Draw(ChaCha8Rng);

/// The engine's reply to one request.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) ids: Vec<u32>,
    pub(crate) finish: Finish,
}

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.0.next_u64() % end as u64).unwrap()
    }

    pub(crate) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn words(&mut self, most: usize) -> String {
        (0..self.below(most + 1)).map(|_| self.pick(&WORDS)).collect()
    }

    /// Output of a command: nothing, line ends, any text, control tokens, or far too much.
    pub(crate) fn output(&mut self) -> String {
        match self.below(8) {
            0 => String::new(),
            1 => "\n".repeat(self.below(4)),
            2 => self.words(12).repeat(60),
            3 => format!("{}\n", self.words(6)).repeat(100),
            _ => {
                let mut text = self.words(6);
                for _ in 0..self.below(4) {
                    text.push_str(self.pick(&LOOKALIKES));
                    text.push_str(&self.words(4));
                }
                text
            }
        }
    }

    fn value(&mut self) -> String {
        let mut text = self.words(5);
        if self.one_in(3) {
            text.push_str(self.pick(&LOOKALIKES));
        }
        text
    }

    fn tools(&mut self) -> String {
        let value = serde_json::to_string(&self.value()).unwrap();
        match self.below(8) {
            0 => String::new(),
            1 => "<tool_call>{\"name\": </tool_call>".to_owned(),
            2 => "<tool_call>{\"name\": \"bash\"".to_owned(),
            3 => format!("<tool_call>{{\"name\": {value}, \"arguments\": {{}}}}</tool_call>"),
            4 => format!(
                "<tool_call>{{\"name\": \"edit\", \"arguments\": {{\"path\": \"total.py\", \"line\": 1, \
                 \"new\": {value}}}}}</tool_call>"
            ),
            _ => format!(
                "<tool_call>\n{{\"name\": \"bash\", \"arguments\": {{\"command\": {value}}}}}\n\
                 </tool_call>"
            )
            .repeat(1 + self.below(3)),
        }
    }

    fn r2e(&mut self) -> String {
        let value = self.value();
        let editor = |rest: &str| {
            format!(
                "<function=file_editor>\n<parameter=path>total.py</parameter>\n{rest}</function>"
            )
        };
        match self.below(9) {
            0 => String::new(),
            1 => format!("<function=execute_bash>\n<parameter=cmd>{value}"),
            2 => format!("<function={value}></function>"),
            3 => editor("<parameter=command>undo_edit</parameter>\n"),
            4 => editor(&format!(
                "<parameter=command>insert</parameter>\n<parameter=insert_line>1</parameter>\n\
                 <parameter=new_str>{value}</parameter>\n"
            )),
            5 => editor(&format!(
                "<parameter=command>str_replace</parameter>\n<parameter=old_str>{value}\
                 </parameter>\n"
            )),
            6 => format!("<function=search><parameter=search_term>{value}</parameter></function>"),
            _ => format!(
                "<function=execute_bash>\n<parameter=cmd>x {value}</parameter>\n</function>"
            ),
        }
    }

    fn mini(&mut self) -> String {
        let value = self.value();
        match self.below(6) {
            0 => String::new(),
            1 => format!("```bash\n{value}"),
            2 => format!("```bash\n{value}\n```\n").repeat(2),
            _ => format!("```bash\nx {value}\n```"),
        }
    }

    fn submit(scaffold: Scaffold) -> &'static str {
        match scaffold {
            Scaffold::Tools | Scaffold::Command | Scaffold::External => {
                "<tool_call>{\"name\": \"submit\", \"arguments\": {}}</tool_call>"
            }
            Scaffold::R2eXml => {
                "<function=finish>\n<parameter=command>submit</parameter>\n</function>"
            }
            Scaffold::Mini => "```bash\nsubmit\n```",
        }
    }

    /// Text of a turn: optional thinking, some words, and a call or something else.
    fn turn(&mut self, scaffold: Scaffold, thinks: bool) -> String {
        let mut text = String::new();
        if thinks && !self.one_in(5) {
            text = format!("<think>\n{}\n</think>\n\nSo ", self.words(6));
        }
        text.push_str(&self.words(3));
        let call = match scaffold {
            Scaffold::Tools | Scaffold::Command | Scaffold::External => self.tools(),
            Scaffold::R2eXml => self.r2e(),
            Scaffold::Mini => self.mini(),
        };
        text.push_str(&call);
        if self.one_in(12) {
            text.push_str(Self::submit(scaffold));
        }
        text
    }

    /// Ids that a policy may sample for a text: the tokenizer's own, or others with the same text.
    /// Control tokens stay whole.
    fn ids(&mut self, chat: &ChatModel, text: &str) -> Vec<u32> {
        if self.one_in(2) {
            return chat.encode(text).unwrap();
        }
        let mut ids = Vec::new();
        let mut piece = String::new();
        let mut inside_tag = false;
        for character in text.chars() {
            inside_tag = (inside_tag || character == '<') && character != '>';
            piece.push(character);
            if !inside_tag && self.one_in(3) {
                ids.extend(chat.encode(&piece).unwrap());
                piece.clear();
            }
        }
        ids.extend(chat.encode(&piece).unwrap());
        ids
    }

    /// The replies of an episode of at most `turns` turns, and the number of turns whose ids differ
    /// from the tokenizer's encoding of their text.
    pub(crate) fn replies(
        &mut self,
        chat: &ChatModel,
        scaffold: Scaffold,
        turns: usize,
        thinks: Option<&str>,
    ) -> (Vec<Reply>, usize) {
        let (mut replies, mut unusual) = (Vec::new(), 0);
        for _ in 0..turns {
            let text = self.turn(scaffold, thinks.is_some());
            // The part that is already in the prompt is not sampled.
            let text = thinks.and_then(|header| text.strip_prefix(header)).unwrap_or(&text);
            let mut ids = self.ids(chat, text);
            unusual += usize::from(ids != chat.encode(text).unwrap());
            if self.one_in(6) && thinks.is_none() {
                // Any token that does not stop the turn: parts of characters, control tokens, …
                let any = u32::try_from(self.below(chat.vocab_size())).unwrap();
                let at = self.below(ids.len() + 1);
                if !chat.stop_token_ids().contains(&any) {
                    ids.insert(at, any);
                }
            }
            let finish = if self.one_in(40) { Finish::Length } else { Finish::Stop };
            if finish == Finish::Stop && (!self.one_in(8) || ids.is_empty()) {
                ids.push(chat.end_of_turn());
            }
            if ids.is_empty() {
                ids.push(chat.encode("x").unwrap()[0]);
            }
            if ids.len() > 2 && self.one_in(8) {
                let tail = ids.split_off(1 + self.below(ids.len() - 1));
                replies.push(Reply { ids, finish: Finish::Abort });
                replies.push(Reply { ids: tail, finish });
            } else {
                replies.push(Reply { ids, finish });
            }
        }
        (replies, unusual)
    }
}
