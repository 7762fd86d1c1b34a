"""Languages of sentences, one or more for each that the module knows."""

# ruff: noqa: RUF001  (sentences of other scripts)
import pytest
from megaswift.tasks.rewards.rules.language import SCRIPTS, language_of

SENTENCES = {
    "en": "The weather was nice, so we walked to the river and sat there for an hour.",
    "es": "El tiempo era bueno, así que caminamos al río y nos sentamos allí una hora, pero no muy cerca del agua.",
    "fr": "Il faisait beau, nous avons donc marché jusqu'à la rivière et nous sommes restés une heure sur un banc.",
    "pt": "O tempo estava bom, por isso caminhamos até o rio e ficamos uma hora sentados, mas não muito perto da água.",
    "it": "Il tempo era bello, così siamo andati al fiume e ci siamo seduti per un'ora, ma non vicino alla riva.",
    "de": "Das Wetter war schön, also gingen wir zum Fluss und saßen dort eine Stunde, aber nicht zu nah am Wasser.",
    "nl": "Het weer was mooi, dus we liepen naar de rivier en zaten daar een uur, maar niet te dicht bij het water.",
    "pl": "Pogoda była ładna, więc poszliśmy nad rzekę i siedzieliśmy tam godzinę, ale nie za blisko wody.",
    "vi": "Thời tiết đẹp nên chúng tôi đi bộ ra sông và ngồi ở đó một giờ, nhưng không gần nước.",
    "fi": "Sää oli kaunis, joten kävelimme joelle ja istuimme siellä tunnin, mutta ei liian lähellä vettä.",
    "sw": "Hali ya hewa ilikuwa nzuri, kwa hiyo tulitembea na kukaa katika mto kwa saa moja, lakini si karibu na maji.",
    "tr": "Hava güzeldi, bu yüzden nehre kadar yürüdük ve orada bir saat oturduk, ama suya çok yakın değil.",
    "sv": "Vädret var fint, så vi gick till floden och satt där en timme, men inte för nära vattnet.",
    "ru": "Погода была хорошая, и мы пошли к реке, но не сидели там так долго, как хотели.",
    "uk": "Погода була гарна, і ми пішли до річки, але не сиділи там так довго, як хотіли, бо це далеко.",
    "bg": "Времето беше хубаво и ние отидохме до реката, но не седяхме там за дълго, защото това е далеч от нас.",
    "ar": "كان الطقس جميلا، لذلك مشينا إلى النهر وجلسنا هناك ساعة من الزمن، لكن لا أحد كان في الماء",
    "fa": "هوا خوب بود و ما به رودخانه رفتیم و یک ساعت در آن جا نشستیم، اما این کار را با دوستان نکردیم",
    "ur": "موسم اچھا تھا اور ہم دریا کے کنارے گئے، لیکن وہاں ایک گھنٹے سے زیادہ نہیں بیٹھے، یہ بہت دور ہے",
    "hi": "मौसम अच्छा था और हम नदी के किनारे गए, लेकिन वहाँ एक घंटे से अधिक नहीं बैठे।",
    "mr": "हवामान छान होते आणि आम्ही नदीवर गेलो, पण तिथे एक तास बसलो नाही, कारण ते दूर आहे.",
    "ne": "मौसम राम्रो थियो र हामी नदीमा गयौं, तर त्यहाँ एक घण्टा पनि बसेनौं, किनभने यो टाढा छ।",
    "bn": "আবহাওয়া ভালো ছিল, তাই আমরা নদীর ধারে গেলাম।",
    "gu": "હવામાન સારું હતું, તેથી અમે નદી પર ગયા.",
    "pa": "ਮੌਸਮ ਚੰਗਾ ਸੀ, ਇਸ ਲਈ ਅਸੀਂ ਨਦੀ ਤੇ ਗਏ।",
    "ko": "날씨가 좋아서 우리는 강까지 걸어갔습니다.",
    "he": "מזג האוויר היה נעים, אז הלכנו אל הנהר.",
    "ja": "天気がよかったので、私たちは川まで歩きました。",
    "zh": "天气很好，所以我们走到了河边。",
    "kn": "ಹವಾಮಾನ ಚೆನ್ನಾಗಿತ್ತು, ಆದ್ದರಿಂದ ನಾವು ನದಿಗೆ ಹೋದೆವು.",
    "ml": "കാലാവസ്ഥ നല്ലതായിരുന്നു, അതിനാൽ ഞങ്ങൾ നദിയിലേക്ക് പോയി.",
    "ta": "வானிலை நன்றாக இருந்தது, எனவே நாங்கள் ஆற்றுக்குச் சென்றோம்.",
    "te": "వాతావరణం బాగుంది, కాబట్టి మేము నదికి వెళ్ళాము.",
    "th": "อากาศดี เราจึงเดินไปที่แม่น้ำ",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_language(language):
    assert language_of(SENTENCES[language]) == language


def test_each_language_has_a_sentence():
    assert {language for languages in SCRIPTS.values() for language in languages} == set(SENTENCES)


@pytest.mark.parametrize("text", ["", "1 + 1 = 2", "🙂🙂", "xyzzy plugh"])
def test_texts_of_no_language(text):
    assert language_of(text) is None


def test_the_script_of_most_letters_decides():
    assert language_of("Он сказал «hello», и мы не поняли, что это по-английски.") == "ru"
    assert language_of("東京都に住んでいます") == "ja"  # most characters are Chinese ones
