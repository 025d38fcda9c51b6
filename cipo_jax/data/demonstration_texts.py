"""The sentences of warm-start demonstrations, with `{fields}` for names and relations."""

SINGLE_QUESTION = "What is the {relation} of {subject}?"
THINK_START = "I need the {relation} of {subject}."
THINK_READ = "The {relation} of {subject} is {object}."
SEARCH_ACTION = "<think> {think} </think><search> {query} </search>"
ANSWER_ACTION = "<think> {think} </think><answer> {answer} </answer>"
# Malformed: a query outside its tags, and an answer that is never closed.
BARE_QUERY_ACTION = "<think> {think} </think> {query}"
UNCLOSED_ANSWER_ACTION = "<think> {think} </think><answer> {answer}"

ALL_TEXTS = (
    SINGLE_QUESTION,
    THINK_START,
    THINK_READ,
    SEARCH_ACTION,
    ANSWER_ACTION,
    BARE_QUERY_ACTION,
    UNCLOSED_ANSWER_ACTION,
)
