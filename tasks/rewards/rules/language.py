# ruff: noqa: RUF001  (words of other scripts)
"""The language of a text, by its script and its most frequent words.

It knows the languages of IFEval's instruction `language:response_language`, and Chinese.
"""

import re
import unicodedata
from collections import Counter
from functools import cache

SCRIPTS = {  # first word of the Unicode names of its letters -> languages
    "LATIN": ("en", "es", "fr", "pt", "it", "de", "nl", "pl", "vi", "fi", "sw", "tr", "sv"),
    "CYRILLIC": ("ru", "uk", "bg"),
    "ARABIC": ("ar", "fa", "ur"),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "BENGALI": ("bn",),
    "GUJARATI": ("gu",),
    "GURMUKHI": ("pa",),
    "HANGUL": ("ko",),
    "HEBREW": ("he",),
    "HIRAGANA": ("ja",),
    "KATAKANA": ("ja",),
    "CJK": ("zh",),
    "KANNADA": ("kn",),
    "MALAYALAM": ("ml",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "THAI": ("th",),
}
WORDS = {  # frequent words, of which texts of other languages have few
    "en": "the of and to in is that it for you with on are this be not have as was but they your will can from i my",
    "es": "el los las de que y en un una es por con para del se no lo su al como más pero está muy hay yo mi",
    "fr": "le les des de et la en un une est que qui pour dans ce il sur pas au avec sont vous nous je du mais plus",
    "pt": "o os as de que e em um uma é por com para do da não se na no mais mas ao são você eu muito dos",
    "it": "il lo gli di che e un una è per con non sono del della nel alla si come più ma questo anche io mi la",
    "de": "der die das und ist in zu den nicht ein eine von mit dem sich auf für es ich sie wir auch als im war aber",
    "nl": "de het een en van is in dat niet op te zijn met voor er maar aan ik je deze ook naar wordt bij als",
    "pl": "i w na z się nie jest to że do o jak ale po od za tak są dla przez jego który można ten czy",
    "vi": "và là của có không được cho trong một những các với người này đã để khi tôi bạn đó như nhiều cũng",
    "fi": "ja on ei se että hän oli mutta ovat tai kun niin myös joka ole sen minä sinä kuin ovat hyvin tämä",
    "sw": "na ya wa kwa ni katika la cha za kuwa hii huu yake lakini pia au kama watu mimi sana wewe hiyo",
    "tr": "ve bir bu da de için ile çok ne gibi daha ama olarak ben var en olan kadar değil sonra",
    "sv": "och att det som en är på av för med till den inte har jag ett om men var de kan",
    "ru": "и в не на что я с он как это по но из у за то все так же от для мы вы был есть или его её",
    "uk": "і в не на що я з він як це але та до у за то все так від для ми ви є або його її який",
    "bg": "и в не на че се от за да с по е са като но си ще това аз той или със която към при как",
    "ar": "في من على إلى أن هذا التي عن مع ما هو كان هي لا أو كل ذلك هذه الذي بعد و قد",
    "fa": "در به از که این را با است برای آن یک می خود تا بر هم ما و شما شد های او",
    "ur": "کے میں کی ہے اور سے کا کو اس پر نہیں ایک یہ کر ہیں بھی تھا وہ آپ لیے نے جو",
    "hi": "के में है की और से का को यह पर नहीं एक हैं भी था वह कर लिए ने आप हो जो तो",
    "mr": "आहे आणि मध्ये या हे ते नाही एक आहेत होते तो तर की मी साठी पण हा झाले त्या",
    "ne": "छ र मा को हो लागि यो छन् का पनि गर्न भने एक थियो तर हामी म गरेको ले छैन",
}
WORD = re.compile(r"[^\W\d_]+(?:[\u0300-\u036f\u0900-\u0dff]+[^\W\d_]*)*")


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code of a text's language; None if none is recognized."""
    scripts = Counter(script for character in text if (script := _script(character)))
    if not scripts:
        return None
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts.total():  # mixed with Chinese characters
        return "ja"
    languages = SCRIPTS[scripts.most_common(1)[0][0]]
    if len(languages) == 1:
        return languages[0]
    words = Counter(WORD.findall(unicodedata.normalize("NFC", text.lower())))
    hits = {language: sum(words[word] for word in _words(language)) for language in languages}
    best = max(hits, key=hits.__getitem__)
    return best if hits[best] else None


@cache
def _script(character: str) -> str:
    """Return the script of a letter, as SCRIPTS names it; "" for other characters."""
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "").partition(" ")[0]
    return name if name in SCRIPTS else ""


@cache
def _words(language: str) -> frozenset[str]:
    return frozenset(unicodedata.normalize("NFC", WORDS[language]).split())
